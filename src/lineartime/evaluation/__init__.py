"""Measures of how good a model is."""

from lineartime.evaluation.perplexity import Evaluation, Position, carried, windowed

__all__ = ["Evaluation", "Position", "carried", "windowed"]
