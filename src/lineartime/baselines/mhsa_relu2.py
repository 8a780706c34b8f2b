"""Multi-head attention with relu^2 instead of softmax: an ablation of the Transformer.

Shapes: B batch, N new tokens of a stream, R rows, H heads, L tokens of a row, h head width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "softmax -> relu^2".

    o[t] = sum over visible j of relu(q[t].k[j] / sqrt(h))^2 v[j]  /  n        n: the number of visible keys
"""

from torch import Tensor

from lineartime.layers.attention import MultiHeadMixer, fold_heads
from lineartime.ops.batch import Batch
from lineartime.ops.modes import acc_dtype
from lineartime.ops.quadratic import attend_rows, quadratic_attention_extend
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.state import KVCache


class MHSARelu2(MultiHeadMixer):
    """Multi-head attention with relu^2 instead of softmax.

    Each head attends like a GAU. The options are those of `MultiHeadMixer`.
    """

    name = "mhsa-relu2"
    any_positions = True
    backend = "auto"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        mask = None if real is None else real.repeat_interleave(self.n_heads, 0)
        options = QuadraticOptions(self.causal)
        return attend_rows(fold_heads(q), fold_heads(k), fold_heads(v), None, mask, options, self.backend or "auto").view_as(v)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, batch: Batch) -> tuple[Tensor, KVCache]:
        return quadratic_attention_extend(q, k, v, state, batch=batch)

    def init_own_state(self, batch_size: int) -> KVCache:
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        return KVCache(self.first_position(batch_size), empty, empty)
