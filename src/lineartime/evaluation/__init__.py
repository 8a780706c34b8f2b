"""How well a model predicts text."""

from lineartime.evaluation.corpus import evaluate
from lineartime.evaluation.perplexity import Evaluation, Position, carried, windowed

__all__ = ["Evaluation", "Position", "carried", "evaluate", "windowed"]
