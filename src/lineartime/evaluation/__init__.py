"""How well a model predicts text."""

from lineartime.evaluation.corpus import evaluate
from lineartime.evaluation.perplexity import Evaluation, PositionLoss, difference, evaluate_carried, evaluate_windowed

__all__ = ["Evaluation", "PositionLoss", "difference", "evaluate", "evaluate_carried", "evaluate_windowed"]
