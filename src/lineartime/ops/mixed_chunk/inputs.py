"""The inputs of every form of mixed chunk attention, their checks, and the divisors as factors.

Shapes: B batch, T tokens, G chunks, C chunk size, e value width, s query/key width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError, check_choice
from lineartime.ops.activations import CHUNK_NORMALIZATIONS, Activation, Normalization, known_activations
from lineartime.ops.batch import Batch, count_before, sum_chunks
from lineartime.ops.checks import check_positive, check_queries_keys_values, check_whole
from lineartime.ops.mixed_chunk.memories import Memory
from lineartime.ops.modes import acc_dtype, is_traced, under_transform
from lineartime.ops.positions import over_heads, rotate


@dataclass(frozen=True)
class MixedChunkOptions:
    """The options of mixed chunk attention.

    Attributes:
        chunk_size: C; T need not be a multiple of it.
        causal: whether a token attends only to itself and earlier tokens.
        activation: the activation of the quadratic part: "relu2" or "softmax".
        normalization: "count" divides by the number of visible keys. "paper" has the published scores q.k / C + bias, and
            averages K^T V / C over the visible chunks. "paper_sum" has these scores and the linear part of published ports: a
            causal layer sums K^T V / C over the previous chunks without averaging, so outputs grow with the position; a
            bidirectional layer divides by the number of tokens, even if the last chunk is not full.
        memory: what the linear part reads of the chunks: "sum", as published, or "mesa", without a divisor: see `memories`.
    """

    chunk_size: int
    causal: bool = False
    activation: Activation = "relu2"
    normalization: Normalization = "count"
    memory: Memory = "sum"

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, known_activations())
        check_choice("normalization", self.normalization, CHUNK_NORMALIZATIONS)
        check_positive(chunk_size=self.chunk_size)

    @property
    def published_length(self) -> float | None:
        """The n of the published q.k / n, or None for the count of visible keys."""
        return None if self.normalization == "count" else float(self.chunk_size)

    @property
    def divides_by_chunk_size(self) -> bool:
        """Whether the linear part divides by C, however many chunks it sums over."""
        return self.normalization == "paper_sum" and self.causal

    def linear_divisor(self, n_tokens: Tensor) -> Tensor:
        """The divisor of the linear part for a sum of k v^T over `n_tokens` tokens, int or float."""
        if self.memory != "sum":
            return torch.ones_like(n_tokens)
        return torch.full_like(n_tokens, self.chunk_size) if self.divides_by_chunk_size else n_tokens.clamp(min=1)


class Heads(NamedTuple):
    """Queries and keys [B, T, s] of the quadratic and of the linear part, and the values [B, T, e] that both share."""

    q_quad: Tensor
    k_quad: Tensor
    q_lin: Tensor
    k_lin: Tensor
    v: Tensor


class Projected(NamedTuple):
    """The projected tokens of a FLASH layer.

        U, V, Z = split(silu(tokens))                                    [B,T,e] [B,T,e] [B,T,s]
        q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)        i = 1 ... 4

    Attributes:
        tokens: [B, T, 2 e + s], the gate, the values and the base of queries and keys, all before SiLU.
        gamma, beta: [4, s].
        projection_bias: [2 e + s], a bias that must still be added to the tokens, or None.
        linear: the queries and keys of the linear part, [B, T, s], of mesa, from `memories.queries_and_keys`; None for the sum.
    """

    tokens: Tensor
    gamma: Tensor
    beta: Tensor
    projection_bias: Tensor | None = None
    linear: tuple[Tensor, Tensor] | None = None

    @property
    def d_qk(self) -> int:
        """The query/key width s."""
        return self.gamma.shape[1]

    def with_bias(self) -> "Projected":
        """The same, with the bias added."""
        if self.projection_bias is None:
            return self
        return self._replace(tokens=self.tokens + self.projection_bias.to(self.tokens.dtype), projection_bias=None)

    def activate(self) -> tuple[Tensor, Tensor, Tensor]:
        """U, V and Z."""
        d_value = (self.tokens.shape[-1] - self.d_qk) // 2
        gate, v, z = F.silu(self.tokens).split([d_value, d_value, self.d_qk], -1)
        return gate, v, z

    def base(self) -> Tensor:
        """Y, of which Z is silu, [B, T, s]."""
        return self._biased(self.tokens[..., -self.d_qk :])

    def with_base(self) -> tuple["Projected", Tensor]:
        """The same, for one form of attention alone to read, and Y, [B, T, s]."""
        if not (torch.is_grad_enabled() and self.tokens.requires_grad) or is_traced() or under_transform():
            return self, self.base()
        tokens, y = _WithBase.apply(self.tokens, self.d_qk)  # type: ignore[no-untyped-call]
        return self._replace(tokens=tokens), self._biased(y)

    def _biased(self, y: Tensor) -> Tensor:
        bias = self.projection_bias
        return y if bias is None else y + bias[-self.d_qk :].to(y.dtype)

    def heads(self, rotations: Tensor | None) -> tuple[Tensor, Heads]:
        """The gate U, and the heads, rotated by `rotations` [2, T, s / 2] or [2, B, T, s / 2]."""
        gate, v, z = self.activate()
        if self.linear is None:
            return gate, Heads(*(*queries_and_keys(z, self.gamma, self.beta, rotations).unbind(1), v))
        q_quad, k_quad = queries_and_keys(z, self.gamma[:2], self.beta[:2], rotations).unbind(1)
        return gate, Heads(q_quad, k_quad, *self.linear, v)


class _WithBase(torch.autograd.Function):
    """Tokens, and a copy of their last s features, whose gradient is added in the memory of the tokens' gradient.

    The gradient of a slice is as large as the tokens: to fill and add it took a tenth of a training step. The gradient of the
    tokens is new memory of the attention that reads them, and nothing else holds it.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, d_qk: int) -> tuple[Tensor, Tensor]:
        ctx.d_qk = d_qk
        return tokens.view_as(tokens), tokens[..., -d_qk:].clone()

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor, d_base: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # a second derivative needs the gradient as it was
            d_tokens = d_tokens.clone()
        d_tokens[..., -ctx.d_qk :] += d_base
        return d_tokens, None


def queries_and_keys(z: Tensor, gamma: Tensor, beta: Tensor, rotations: Tensor | None) -> Tensor:
    """rope(Z * gamma_i + beta_i) for every i: [B, T, s], [maps, s], [maps, s] -> [B, maps, T, s]."""
    maps = torch.addcmul(beta[:, None], z[..., None, :, :], gamma[:, None])
    return rotate(maps, over_heads(rotations))


class ChunkScales(NamedTuple):
    """The factors that a fused form applies; an empty slot adds nothing, because its values are zero.

    Attributes:
        score_scale: the factor of the products of queries and keys in the quadratic part.
        row_scale: float32 or better, [B or 1, G or 1, C or 1], the factor of a query's weights in the quadratic part.
        state_scale: the same dtype, [B or 1, G], the factor of the sums of k v^T that a chunk uses.
    """

    score_scale: float
    row_scale: Tensor
    state_scale: Tensor


def chunk_scales(batch: Batch, options: MixedChunkOptions, d_qk: int, like: Tensor, before: int = 0) -> ChunkScales:
    """The divisors of both parts, as factors, for documents after `before` other tokens.

    `like` determines the device and, if it is float64, the dtype.
    """
    causal = options.causal
    sizes = batch.sizes(like.new_empty(0, dtype=acc_dtype(like)))
    tokens = (sizes > 0).to(sizes.dtype) * options.chunk_size if options.normalization == "paper" else sizes
    if options.published_length is not None:
        score, row = 1 / options.published_length, sizes.new_ones(1, 1, 1)
    else:
        score = d_qk**-0.5
        # Real tokens come before empty slots, so the slot of a query determines how many keys it sees.
        slots = torch.arange(1, batch.chunk_size + 1, device=sizes.device)
        row = 1 / slots.to(sizes.dtype)[None, None] if causal else 1 / sizes.clamp(min=1)[..., None]
    if causal:  # not by `sum_chunks`, for whose steps compiled code would be compiled again for other lengths of documents
        read = count_before(tokens, batch).to(sizes.dtype)
    else:
        read = sum_chunks(tokens, batch, "all").expand_as(sizes)
    return ChunkScales(score, row, 1 / options.linear_divisor(before + read + batch.elsewhere(causal)))


def check_heads(heads: Heads) -> None:
    """Raise ArgumentError unless queries and keys are [B, T, s], with the same s, for values [B, T, e]."""
    check_queries_keys_values({name: getattr(heads, name) for name in Heads._fields[:-1]}, heads.v)


def check_positions(positions: Tensor | None, batch: int, length: int, width: int) -> None:
    """Raise ArgumentError unless positions are None, or int [T] or [B, T], for vectors of an even width."""
    if positions is None:
        return
    check_whole("positions", positions)
    if positions.shape not in ((length,), (batch, length)):
        shape = list(positions.shape)
        raise ArgumentError("positions", f"has shape {shape}, but must be [T] = [{length}] or [B, T] = [{batch}, {length}].")
    if width % 2:
        raise ArgumentError("positions", f"rotate pairs of features, but s is {width}: use an even s, or None.")


def check_projected(projected: Projected) -> None:
    """Raise ArgumentError unless the shapes fit together."""
    tokens, gamma, beta = projected[:3]
    for name, tensor in (("gamma", gamma), ("beta", beta)):
        if tensor.dim() != 2 or tensor.shape[0] != 4:
            raise ArgumentError(name, f"has shape {list(tensor.shape)}, but must be [4, s].")
    d_qk = gamma.shape[1]
    if beta.shape[1] != d_qk:
        raise ArgumentError("beta", f"has shape {list(beta.shape)}, but must be that of gamma, {list(gamma.shape)}.")
    if tokens.dim() != 3 or (tokens.shape[-1] - d_qk) % 2 or tokens.shape[-1] <= d_qk:
        raise ArgumentError("projected", f"has shape {list(tokens.shape)}, but must be [B, T, 2 e + s] with s = {d_qk}.")
