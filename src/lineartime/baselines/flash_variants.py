"""FLASH with a part left out, or with first tokens that attend with softmax instead of relu^2.

    flash-local:         out[t] = o_quad[t]: no token attends beyond its own chunk
    flash-global:        out[t] = o_lin[t]: a causal token does not attend to its own chunk, so chunks are small
    flash-cls:           o_quad[0] = sum over j in L(0) of softmax over j (q_quad[0].k_quad[j] / sqrt(s) + bias[-j]) v[j]
    flash-first-to-all:  o_quad[t] = sum over all j of softmax over j (q_quad[t].k_quad[j] / sqrt(s)) v[j]
                         for the first token t of a chunk

Where softmax replaces the quadratic part, the linear part stays. A token that attends to the whole document has no relative
bias, because the bias is only defined for positions inside a chunk.

Shapes: N tokens, T tokens of a document, R rows, L tokens of a row, Q queries, C chunk size, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447): the ablations "local only" and "global only", the latter with
chunks of 64, and section 4.3 on fine-tuning.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import masked_products, real_tokens
from lineartime.layers.flash import FLASH
from lineartime.layers.mixer import MixerOptions
from lineartime.ops.activations import Normalization
from lineartime.ops.mixed_chunk import MixedChunkState, attend, mixed_chunk_state
from lineartime.ops.modes import matmul_dtype, without_autocast
from lineartime.ops.packing import Packing


def flash_cls_oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new output of the document's first token; bias: [2 C - 1], for the distances from 1 - C to C - 1."""
    near = slice(0, min(chunk_size, len(v)))
    weights = (k[near] @ q[0] / q.shape[-1] ** 0.5 + bias[chunk_size - 1 :][near]).softmax(0)
    return {0: weights @ v[near]}


def flash_first_to_all_oracle(q: Tensor, k: Tensor, v: Tensor, *, chunk_size: int) -> dict[int, Tensor]:
    """The new outputs of the first tokens of all chunks."""
    return {t: (k @ q[t] / q.shape[-1] ** 0.5).softmax(0) @ v for t in range(0, len(v), chunk_size)}


class FLASHVariant(FLASH):
    """FLASH with another quadratic or linear part, in plain PyTorch."""

    splits_context = False
    reads_prefix = False
    backend = None


class FLASHLocal(FLASHVariant):
    """FLASH whose tokens attend only within their chunk.

    `FLASH` without its linear part. The options are those of `FLASH`.
    """

    name = "flash-local"
    n_maps = 2

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q, k = maps
        return attend(q, k, None, None, v, packing, self.options(packing), state)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        like = self.any_parameter
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, like, maps=1, linear=False)


class FLASHGlobalOptions(MixerOptions, total=False):
    """The options of `FLASH` that are not those of its quadratic part."""

    d_qk: int
    expansion: int
    normalization: Normalization
    rope: bool


class FLASHGlobal(FLASHVariant):
    """FLASH with linear attention across chunks of 64 alone.

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        **options: the options of `FLASH`, except those of the quadratic part: activation, relative_bias and initial_scores.
    """

    name = "flash-global"
    n_maps = 2

    def __init__(self, d_model: int, *, chunk_size: int = 64, **options: Unpack[FLASHGlobalOptions]) -> None:
        # Passed explicitly, so that a caller who passes them gets a TypeError.
        super().__init__(
            d_model, chunk_size=chunk_size, activation="relu2", relative_bias=False, initial_scores="small", **options
        )

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q, k = maps
        return attend(None, None, q, k, v, packing, self.options(packing), state)

    def init_own_state(self, batch_size: int) -> MixedChunkState:
        return mixed_chunk_state(batch_size, self.chunk_size, self.d_qk, self.d_value, self.any_parameter, maps=1)


class FLASHBySoftmax(FLASHVariant):
    """FLASH whose first tokens of some chunks attend with softmax instead of relu^2; a subclass says to what."""

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        """The quadratic part of the first tokens of a row's first chunks: [R, L, s], [R, L, s], [R, L, e] -> [R, Q, e].

        `real`, bool [R or 1, L], is False for padding.
        """
        raise NotImplementedError

    def attend(self, maps: Sequence[Tensor], v: Tensor, packing: Packing, state: Any) -> tuple[Tensor, Any]:
        q_quad, k_quad, q_lin, k_lin = maps
        options, compute = self.options(packing), matmul_dtype(*maps, v)
        local, _ = attend(q_quad, k_quad, None, None, v, packing, options)
        across, _ = attend(None, None, q_lin, k_lin, v, packing, options)

        def replaced(q: Tensor, k: Tensor, v: Tensor, local: Tensor, real: Tensor | None) -> Tensor:
            first = self.by_softmax(q, k, v, real_tokens(v, real), packing)
            places = torch.arange(0, v.shape[1], self.chunk_size, device=v.device)[: first.shape[1]]
            return local.index_copy(1, places, first.to(local.dtype))

        with without_autocast(v):
            return packing.by_row(replaced, *(x.to(compute) for x in (q_quad, k_quad, v)), local) + across, None


class FLASHCLS(FLASHBySoftmax):
    """FLASH for fine-tuning: [CLS] attends with softmax.

    [CLS] is the first token of a document. It attends to its chunk. The options are those of `FLASH`.
    """

    name = "flash-cls"
    why_not_causal: ClassVar[str] = "its first token has to see the tokens that follow"

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        k, v, real = k[:, : self.chunk_size], v[:, : self.chunk_size], real[:, : self.chunk_size]
        scores = masked_products(q[:, :1], k, real[:, None])
        if self.bias is not None:
            scores = scores + self.bias(k.shape[1], packing)[k.shape[1] - 1 :]
        return scores.softmax(-1).to(v.dtype) @ v


class FLASHFirstToAll(FLASHBySoftmax):
    """FLASH for fine-tuning: the first token of each chunk attends to all tokens.

    These tokens attend to the whole document with softmax. The options are those of `FLASH`.
    """

    name = "flash-first-to-all"
    why_not_causal: ClassVar[str] = "the first token of a chunk has to see the whole sequence"

    def by_softmax(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, packing: Packing) -> Tensor:
        """In time T^2 / C."""
        return masked_products(q[:, :: self.chunk_size], k, real[:, None]).softmax(-1).to(v.dtype) @ v
