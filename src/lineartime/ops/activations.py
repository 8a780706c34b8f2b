"""The names of activations and normalizations, and what an activation computes of scores."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor

Activation = Literal["relu2", "softmax"]
Normalization = Literal["count", "paper", "paper_sum"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NORMALIZATIONS: tuple[str, ...] = ("count", "paper")
"""The normalizations of every attention. Mixed chunk attention also has "paper_sum", in which its linear part sums over chunks
without averaging."""


def relu2(scores: Tensor) -> Tensor:
    """The square of the positive part (arXiv 2202.10447, section 2.2)."""
    return scores.relu().square()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu2": relu2}
"""The activations of each score alone, whose weights the normalization divides. `lineartime.foreign` adds another one."""
SOFTMAXES: dict[str, Callable[[Tensor], Tensor] | None] = {"softmax": None}
"""The softmaxes, with the factor of their scores as a function of the number of visible keys; None for no factor."""
