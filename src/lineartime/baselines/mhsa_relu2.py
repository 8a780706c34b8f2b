"""Multi-head attention with relu^2 instead of softmax: an ablation of the Transformer.

Shapes: N tokens, d model width, H heads, h head width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "softmax -> relu^2".

    o[t] = sum over visible j of relu(q[t].k[j] / sqrt(h))^2 v[j]  /  n        n: the number of visible keys
"""

from typing import Any

from torch import Tensor

from lineartime.baselines.blocks import attend_by_head
from lineartime.layers.attention import MultiHeadMixer
from lineartime.ops.mixed_chunk import MixedChunkOptions, Scales, reciprocal
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache


class MHSARelu2(MultiHeadMixer):
    """Multi-head attention with relu^2 instead of softmax.

    Each head attends like a GAU. The options are those of `MultiHeadMixer`.
    """

    name = "mhsa-relu2"
    any_positions = True
    backend = "auto"

    def attend_heads(self, maps: tuple[Tensor, Tensor, Tensor], packing: Packing, state: Any) -> tuple[Tensor, Any]:
        scales = Scales(self.head_dim**-0.5, reciprocal, reciprocal)
        options = MixedChunkOptions(None, self.causal, scales, backend=self.backend or "auto")
        out, state = attend_by_head(*maps, packing, options, state)
        return out.flatten(1), state

    def init_own_state(self, batch_size: int) -> KVCache:
        empty = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        return KVCache(self.first_position(batch_size), empty, empty)
