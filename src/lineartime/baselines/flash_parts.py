"""What the variants of FLASH in this folder share.

Shapes: N tokens, R rows, L tokens of a row, Q queries, s query/key width, e value width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lineartime.baselines.blocks import real_tokens
from lineartime.layers.flash import FLASH
from lineartime.ops.mixed_chunk import attend
from lineartime.ops.modes import matmul_dtype, without_autocast
from lineartime.ops.packing import Packing


class FLASHVariant(FLASH):
    """FLASH with another quadratic or linear part, in plain PyTorch."""

    splits_context = False
    reads_prefix = False
    backend = None


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
