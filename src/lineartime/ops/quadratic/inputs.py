"""The inputs of every form of quadratic attention: the options, and checks of the arguments.

Shapes: R rows, L slots of a row, T tokens, s query/key width, e value width.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, check_choice
from lineartime.ops.activations import ACTIVATIONS, QUADRATIC_NORMALIZATIONS, Activation, Normalization
from lineartime.ops.checks import check_bias
from lineartime.ops.positions import FactoredBias


@dataclass(frozen=True)
class QuadraticOptions:
    """The options of quadratic attention.

    Attributes:
        causal: whether a token attends only to itself and earlier tokens.
        activation: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys. "paper" is the published relu(q.k / n + bias)^2, with n
            the number of real tokens of the row. "paper_bias" is "paper" with the bias divided by n, too. An integer is a fixed
            n for "paper", which a causal model needs: with n from the current length, later tokens would change earlier
            outputs.
    """

    causal: bool = False
    activation: Activation = "relu2"
    normalization: Normalization | int = "count"

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, ACTIVATIONS)
        fixed = isinstance(self.normalization, int) and not isinstance(self.normalization, bool)
        if not fixed or self.normalization < 1:  # type: ignore[operator]  # a number
            check_choice("normalization", self.normalization, QUADRATIC_NORMALIZATIONS)

    @property
    def bidirectional(self) -> "QuadraticOptions":
        """The same options for bidirectional attention."""
        return replace(self, causal=False)

    def published_length(self, length: int, real: Tensor | None) -> float | Tensor | None:
        """The n of the published q.k / n for rows of `length` slots, a number or [R, 1, 1]; None for "count"."""
        if self.normalization == "count":
            return None
        if not isinstance(self.normalization, str):
            return float(self.normalization)
        return torch.sym_float(length or 1) if real is None else real.sum(1).clamp(min=1)[:, None, None]

    @property
    def divides_bias(self) -> bool:
        """Whether the bias is divided by the n of the published q.k / n, like the product. A softmax does not use n."""
        return self.normalization == "paper_bias" and self.activation not in ("softmax", "softmax_plus")


def check_quadratic_bias(bias: Tensor | FactoredBias | None, length: int) -> None:
    """Raise ArgumentError unless the bias is None, [T, T], or has two factors [T, f]."""
    if not isinstance(bias, FactoredBias):
        check_bias(bias, length, "T")
        return
    for part in bias:
        if part.dim() != 2 or len(part) != length:
            raise ArgumentError("bias", f"has factors of shape {list(part.shape)}, but they must be [T, f] with T = {length}.")
    if bias.of_queries.shape != bias.of_keys.shape:
        shapes = " and ".join(str(list(part.shape)) for part in bias)
        raise ArgumentError("bias", f"has factors of shapes {shapes}, but they must have the same shape [T, f].")
