"""The base of every layer: a norm and a residual connection.

Shapes: B batch, T tokens, d model width.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lineartime.errors import ArgumentError
from lineartime.layers.checks import check_options, check_tokens
from lineartime.layers.dense import FactoryOptions, reset_parts
from lineartime.layers.norms import Norm, build_norm
from lineartime.layers.options import constructor_options
from lineartime.ops.checks import check_positive


class LayerOptions(FactoryOptions, total=False):
    """What every layer takes: see `ResidualLayer`."""

    norm: Norm
    norm_eps: float
    dropout: float


class ResidualLayer(nn.Module):
    """Base of all layers: y = x + dropout(f(norm(x))); a subclass supplies f.

    Args:
        d_model: d, the width of inputs and outputs.
        norm: "layernorm", "scalenorm" or "rmsnorm".
        norm_eps: the epsilon that the norm adds to the mean square, or to the variance.
        dropout: probability of dropping an output before the residual.
        device, dtype: the device and dtype of the parameters, as in torch.nn; None for PyTorch's defaults.

    Raises:
        ArgumentError: if an argument has a value that is not allowed.
    """

    name: ClassVar[str]
    """The name in a `LayerConfig`, in JSON and in the documentation; for a mixer, that of its file, with hyphens."""

    def __new__(cls, *_: object, **options: object) -> Self:
        """Check the types of options before a constructor uses them; copying a layer passes no options."""
        check_options(cls, options)
        return super().__new__(cls)

    def __init__(
        self,
        d_model: int,
        *,
        norm: Norm = "layernorm",
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model)
        if not 0 <= dropout < 1:
            raise ArgumentError("dropout", f"is {dropout}, but must be at least 0 and below 1.")
        self.d_model = d_model
        self.norm = build_norm(norm, d_model, norm_eps, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def init_own(self) -> None:
        """Initialise the layer's own parameters, without those of its submodules; by default, there are none."""

    def reset_parameters(self) -> None:
        """Initialise all parameters of the layer, as its constructor does."""
        reset_parts(self)
        self.init_own()

    def before(self, x: Tensor) -> Tensor:
        """The input of f: norm(x)."""
        normed: Tensor = self.norm(x)
        return normed

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        """The output of the layer, given the output of f: x + dropout(out)."""
        out = self.dropout(out) if self.training else out
        return x + out.to(torch.promote_types(x.dtype, out.dtype))  # adding two dtypes is slower than converting and adding

    def extra_repr(self) -> str:
        """The options, apart from those that submodules show."""
        shown = [name for name in constructor_options(type(self)) if name not in LayerOptions.__annotations__]
        values = {"d_model": self.d_model, **{name: getattr(self, name) for name in shown if hasattr(self, name)}}
        options = [f"{name}={value!r}" for name, value in values.items()]
        return ", ".join(filter(None, [*options, super().extra_repr()]))

    def check_input(self, x: Tensor, argument: str = "x", shape: str = "[B, T, d_model]") -> None:
        """Raise ArgumentError unless x is [B, T, d], with the dtype and on the device of the layer."""
        check_tokens(argument, x, shape, self.d_model, self.norm, self)


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Replace padding in [B, T, d] by zeros, even if it is NaN."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)
