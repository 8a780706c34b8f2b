"""The inputs of every form of quadratic attention: the options, checks of the arguments, and the divisors as factors.

Shapes: R rows, L slots of a row, T tokens, s query/key width, e value width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, check_choice
from lineartime.ops.activations import NORMALIZATIONS, Activation, Normalization, known_activations
from lineartime.ops.checks import check_bias
from lineartime.ops.modes import acc_dtype
from lineartime.ops.positions import FactoredBias


@dataclass(frozen=True)
class QuadraticOptions:
    """The options of quadratic attention.

    Attributes:
        causal: whether a token attends only to itself and earlier tokens.
        activation: "relu2" or "softmax".
        normalization: "count" divides by the number of visible keys. "paper" is the published relu(q.k / n + bias)^2, with n
            the number of real tokens of the row. An integer is a fixed n for "paper", which a causal model needs: with n from
            the current length, later tokens would change earlier outputs.
    """

    causal: bool = False
    activation: Activation = "relu2"
    normalization: Normalization | int = "count"

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, known_activations())
        fixed = isinstance(self.normalization, int) and not isinstance(self.normalization, bool)
        if not fixed or self.normalization < 1:  # type: ignore[operator]  # a number
            check_choice("normalization", self.normalization, NORMALIZATIONS)

    def published_length(self, length: int, real: Tensor | None) -> float | Tensor | None:
        """The n of the published q.k / n for rows of `length` slots, a number or [R, 1, 1]; None for "count"."""
        if self.normalization == "count":
            return None
        if not isinstance(self.normalization, str):
            return float(self.normalization)
        return torch.sym_float(length or 1) if real is None else real.sum(1).clamp(min=1)[:, None, None]


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


class Inputs(NamedTuple):
    """The inputs of a fused form: out[t] = row_scale[t] * sum over visible j of f(score_scale * q[t].k[j] + bias[t, j]) v[j].

    Attributes:
        q, k: [R, L, s].
        v: [R, L, e], zero at keys that must not be read.
        bias: [L, L], or None.
        row_scale: [R, L], float32 or better.
        score_scale: the factor of products.
        causal: whether a token attends only to itself and earlier tokens.
        activation: f.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    row_scale: Tensor
    score_scale: float
    causal: bool
    activation: str


def fused_inputs(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Inputs:
    """The divisors as factors, and a factored bias as features of queries and keys."""
    rows, length, d_qk = q.shape
    row_scale = torch.ones(rows, length, dtype=acc_dtype(q), device=q.device)
    score_scale = d_qk**-0.5
    published_length = options.published_length(length, real)
    if isinstance(published_length, Tensor):  # another scale for each row
        q, score_scale = (q / published_length).to(q.dtype), 1.0
    elif published_length is not None:
        score_scale = 1 / published_length
    else:
        counts = row_scale if real is None else real.to(row_scale.dtype)
        counts = counts.cumsum(1) if options.causal else counts.sum(1, keepdim=True).expand(rows, length)
        row_scale = 1 / counts.clamp(min=1)
    if isinstance(bias, FactoredBias):  # a sum of two products is one product of concatenated features
        of_queries, of_keys = (x.expand(rows, -1, -1) for x in bias)
        q, k = torch.cat([q, (of_queries / score_scale).to(q.dtype)], -1), torch.cat([k, of_keys.to(k.dtype)], -1)
        bias = None
    return Inputs(q, k, v, bias, row_scale, score_scale, options.causal, options.activation)
