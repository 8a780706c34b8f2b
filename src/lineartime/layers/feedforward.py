"""The feed-forward layers of the Transformers. Shapes: B batch, T tokens, d model width."""

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.dense import Dense, factory
from lineartime.layers.residual import LayerOptions, ResidualLayer
from lineartime.ops.checks import check_positive


class MLP(ResidualLayer):
    """Two linear maps with a GELU between them, pre-norm and residual inside: [B, T, d] -> [B, T, d].

    Args:
        expansion: the hidden width is expansion * d.
        **options: the options of `ResidualLayer`.
    """

    name = "mlp"

    def __init__(self, d_model: int, *, expansion: int = 4, **options: Unpack[LayerOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(expansion=expansion)
        self.expansion = expansion
        self.to_hidden = Dense(d_model, expansion * d_model, **factory(options))
        self.to_output = Dense(expansion * d_model, d_model, **factory(options))

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], each token independently."""
        self.check_input(x, shape="[..., d_model]")
        return self.after(x, self.to_output(F.gelu(self.to_hidden(self.before(x)))))


class GLU(ResidualLayer):
    """Gated linear unit with GELU, as many parameters as an `MLP` of the same expansion: [B, T, d] -> [B, T, d].

    Args:
        expansion: each of the two branches has width 2/3 * expansion * d, rounded.
        **options: the options of `ResidualLayer`.

    Source: "GLU Variants Improve Transformer" (arXiv 2002.05202), GEGLU.
    """

    name = "glu"

    def __init__(self, d_model: int, *, expansion: int = 4, **options: Unpack[LayerOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(expansion=expansion)
        self.expansion = expansion
        hidden = round(expansion * d_model * 2 / 3)
        self.to_gate_value = Dense(d_model, hidden, hidden, **factory(options))
        self.to_output = Dense(hidden, d_model, **factory(options))

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], each token independently."""
        self.check_input(x, shape="[..., d_model]")
        gate, value = self.to_gate_value(self.before(x)).chunk(2, dim=-1)
        return self.after(x, self.to_output(F.gelu(gate) * value))
