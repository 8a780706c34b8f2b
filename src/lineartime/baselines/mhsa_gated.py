"""Softmax attention with a gate on its output, like that of a GAU: an ablation of the Transformer.

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), the ablation "add gating".

    out = input + (silu(x Wu + bu) * (o of all heads)) Wo + bo
"""

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.attention import Attention, AttentionOptions
from lineartime.layers.dense import Dense, factory


class MHSAGated(Attention):
    """Softmax multi-head attention with a gate on its output.

    The options are those of `Attention`.
    """

    name = "mhsa-gated"

    def __init__(self, d_model: int, **options: Unpack[AttentionOptions]) -> None:
        super().__init__(d_model, **options)
        self.to_gate = Dense(d_model, d_model, **factory(options))

    def combine(self, normed: Tensor, attended: Tensor) -> Tensor:
        return super().combine(normed, F.silu(self.to_gate(normed)) * attended)
