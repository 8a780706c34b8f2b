"""The attention weights of GAU, FLASH and softmax attention, from a layer's own projections.

Shapes: T tokens of one text, d model width, H heads, which are one in GAU and FLASH.
"""

import torch
from torch import Tensor

from lineartime.layers.attention import Attention
from lineartime.layers.flash import FLASH, GAU
from lineartime.layers.mesa import FLASHMesa
from lineartime.layers.mixer import Mixer
from lineartime.ops.mixed_chunk import attend
from lineartime.ops.modes import acc_dtype


def open_attention(mixer: Mixer, x: Tensor, prefix_lengths: Tensor | None = None) -> dict[str, Tensor]:
    """How much each token (row) reads each other one (column), [H, T, T], by the part of the attention.

    GAU and softmax attention have the part "attention"; FLASH has "local" and "global". Other mixers have none, and the result
    is empty. The sum of the parts times the values is what the layer gates or projects.

    Args:
        mixer: the layer.
        x: its input, one text, [1, T, d].
        prefix_lengths: int64 [1], how many of the first tokens read each other in both directions, or None.
    """
    packing = mixer.describe(x.shape, prefix_lengths=prefix_lengths, device=x.device)
    normed, _ = mixer.shifted(mixer.before(packing.pack(x)), packing, None)
    marks = torch.eye(x.shape[1], dtype=acc_dtype(x), device=x.device)  # values of which an attention returns its weights
    if type(mixer) is Attention:
        q, k, _ = mixer.project(normed, packing)
        read, _ = mixer.attend_heads((q, k, marks[:, None].expand(-1, mixer.n_heads, -1)), packing, None)
        return {"attention": read.unflatten(1, (mixer.n_heads, -1)).transpose(0, 1)}
    if not isinstance(mixer, GAU) or type(mixer) not in (GAU, FLASH, FLASHMesa):
        return {}
    options, y = mixer.options(packing), mixer.to_gate_value_base(normed)[:, -mixer.d_qk :]
    (q, k, *linear), _ = mixer.queries_and_keys(y, packing, None)
    near, _ = attend(q, k, None, None, marks, packing, options)
    if not linear:
        return {"attention": near[None]}
    q, k = linear
    if isinstance(mixer, FLASHMesa):
        q, _ = mixer.solve(q, k, packing, None)
    across, _ = attend(None, None, q, k, marks, packing, options)
    return {"local": near[None], "global": across[None]}
