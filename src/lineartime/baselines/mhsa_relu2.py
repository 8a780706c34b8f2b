"""Multi-head attention with relu^2 in the place of softmax: an ablation of the Transformer.

Shapes: B batch, N new tokens of a stream, R rows, H heads, L tokens of a row, h head width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "softmax -> relu^2".
"""

import torch
from torch import Tensor

from lineartime.layers.multi_head import MultiHeadMixer, fold_heads, map_state
from lineartime.ops.quadratic import QuadraticState, quadratic_attention, quadratic_attention_extend


class MHSARelu2(MultiHeadMixer):
    """Multi-head attention with relu^2 in the place of softmax.

    Heads attend as a GAU does, by relu(q.k / sqrt(h))^2 / n. Options are those of `MultiHeadMixer`.
    """

    name = "mhsa-relu2"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """relu^2 attention, [R, H, L, h] three times -> [R, H, L, h]."""
        mask = None if real is None else real.repeat_interleave(self.n_heads, 0)
        return quadratic_attention(fold_heads(q), fold_heads(k), fold_heads(v), causal=self.causal, mask=mask).view_as(v)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: QuadraticState) -> tuple[Tensor, QuadraticState]:
        """Attend with the cache of all earlier keys and values, and the cache grown by N tokens."""
        heads = v.shape[:2]
        q, k, v = (fold_heads(x) for x in (q, k, v))
        attended, state = quadratic_attention_extend(q, k, v, map_state(fold_heads, state))
        return attended.unflatten(0, heads), map_state(lambda x: x.unflatten(0, heads), state)

    def init_state(self, batch_size: int) -> QuadraticState:
        """The state before the first token of `batch_size` streams; ValueError unless the layer is causal."""
        weight = self.to_output.weight
        empty = self.empty_cache(batch_size, torch.promote_types(weight.dtype, torch.float32))
        return QuadraticState(empty, empty)
