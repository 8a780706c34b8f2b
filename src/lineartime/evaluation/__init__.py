"""How well a model predicts text."""

from lineartime.evaluation.corpus import evaluate
from lineartime.evaluation.perplexity import Evaluation, evaluate_carried, evaluate_windowed
from lineartime.evaluation.positions import PositionLoss

__all__ = ["Evaluation", "PositionLoss", "evaluate", "evaluate_carried", "evaluate_windowed"]
