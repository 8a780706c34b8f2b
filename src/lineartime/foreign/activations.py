"""Activations of checkpoints of other packages. Importing this module adds them to those of `lineartime.ops`."""

import math

import torch
from torch import Tensor

from lineartime.ops.activations import FUNCTIONS, SOFTMAXES

_LAPLACE_MEAN = math.sqrt(1 / 2)
_LAPLACE_DEVIATION = math.sqrt(1 / (4 * math.pi))
_SOFTMAX_PLUS_LENGTH = 512
"""The number of visible keys at which "softmax_plus" is a softmax: the length that GAU-alpha was trained with."""


def laplace(scores: Tensor) -> Tensor:
    """The Laplace attention function of Mega (arXiv 2209.10655, eq. 16): a bounded alternative to relu2."""
    return 0.5 * (1 + torch.erf((scores - _LAPLACE_MEAN) / (_LAPLACE_DEVIATION * math.sqrt(2))))


def softmax_plus_factor(count: Tensor) -> Tensor:
    """The factor of the scores of GAU-alpha's softmax, which grows with the number of visible keys."""
    return count.log() / math.log(_SOFTMAX_PLUS_LENGTH)


FUNCTIONS["laplace"] = laplace
SOFTMAXES["softmax_plus"] = softmax_plus_factor
