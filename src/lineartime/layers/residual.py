"""The base of every layer: a norm, a residual connection, and options that are read from its constructor.

Shapes: B batch, T tokens, d model width.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Never, Self, Unpack, override

from lineartime.errors import ArgumentError, check_choice, did_you_mean
from lineartime.fields import check_type
from lineartime.layers.dense import FactoryOptions, reset_parts
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype

Norm = Literal["layernorm", "scalenorm", "rmsnorm"]


class LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm, also for parameters in another dtype than x: FSDP gathers them in bf16 for an x in float32."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], in the dtype of x.

        PyTorch's kernel for a CPU sums the gradients of weight and bias over all tokens in the dtype of its input.
        """
        wide = x.to(acc_dtype(x)) if x.device.type == "cpu" and torch.is_grad_enabled() else x
        weight = None if self.weight is None else self.weight.to(wide.dtype)
        bias = None if self.bias is None else self.bias.to(wide.dtype)
        out = F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps)
        return out if wide is x else out.to(x.dtype)


class ScaleNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * g with one learned scalar g: [..., d] -> [..., d] (FLASH, arXiv 2202.10447, code 1)."""

    def __init__(self, eps: float = 1e-5, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.empty(1, **factory))  # [1], not a scalar: FSDP2 shards rows
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.g)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        return _rescaled(x, self.g, self.eps)


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * g with a learned g in R^d: [..., d] -> [..., d] (arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float = 1e-5, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        return _rescaled(x, self.weight, self.eps)


def _rescaled(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.to(acc_dtype(x))  # the square of 1,000 does not fit float16
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


class NormParts(NamedTuple):
    """What a norm computes with: (x - mean) / sqrt(variance + eps) * weight + bias; without a mean if not `centred`."""

    weight: Tensor
    bias: Tensor | None
    centred: bool
    eps: float


def norm_parts(norm: nn.Module) -> NormParts | None:
    """The parts of a LayerNorm or one of the norms above; None for any other module, such as a subclass."""
    if (type(norm) is LayerNorm or type(norm) is nn.LayerNorm) and norm.weight is not None:
        return NormParts(norm.weight, norm.bias, True, norm.eps)
    if type(norm) is ScaleNorm:
        return NormParts(norm.g, None, False, norm.eps)
    return NormParts(norm.weight, None, False, norm.eps) if type(norm) is RMSNorm else None


def build_norm(norm: Norm, d_model: int, eps: float = 1e-5, **factory: Unpack[FactoryOptions]) -> nn.Module:
    """Build a norm for inputs [..., d_model]; ArgumentError for an unknown name, or an eps that is not between 0 and 1."""
    check_choice("norm", norm, get_args(Norm))
    if not 0 < eps < 1:
        raise ArgumentError("norm_eps", f"is {eps}, but must be above 0 and below 1.")
    if norm == "layernorm":
        return LayerNorm(d_model, eps, **factory)
    return ScaleNorm(eps, **factory) if norm == "scalenorm" else RMSNorm(d_model, eps, **factory)


class Option(NamedTuple):
    """The type and the default of a keyword argument."""

    type: Any
    default: Any


def constructor_options(layer: type[Any]) -> dict[str, Option]:
    """The keyword arguments of a layer's constructor, by name: those of its bases first, then its own.

    A constructor with `**options: Unpack[SomeOptions]` accepts the arguments that SomeOptions lists. Their types and defaults
    are those of the base class that declares them. A constructor whose `**options` has no such annotation accepts all of them.
    """
    options: dict[str, Option] = {}
    accepted: set[str] | None = None  # None: everything
    for owner in layer.__mro__:
        if "__init__" not in vars(owner):
            continue
        hints = get_type_hints(vars(owner)["__init__"])
        parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        own = {
            parameter.name: Option(hints.get(parameter.name, Any), parameter.default)
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY and (accepted is None or parameter.name in accepted)
        }
        options = {**own, **options}
        passed_on = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        if not passed_on:
            break
        for listed in get_args(hints.get(passed_on[0])):  # Unpack[SomeOptions]
            accepted = set(listed.__annotations__) if accepted is None else accepted & set(listed.__annotations__)
    return options


_options: Callable[[Any], dict[str, Option]] = cache(constructor_options)


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
    """The name in a `LayerConfig`, in JSON and in the documentation."""

    def __new__(cls, *_: object, **options: object) -> Self:
        """Check the types of options before a constructor uses them; copying a layer passes no options.

        Only types that are classes are checked, such as `int | None`. Others, such as Literal, are left to the constructor,
        which may allow fewer choices than its bases.
        """
        known = _options(cls)
        for name in [name for name in options if name in known]:
            hint = known[name].type
            classes = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            if all(isinstance(part, type) and part is not Any and get_origin(part) is None for part in classes):
                check_type(name, options[name], hint)
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
        **unknown: Never,
    ) -> None:
        for name in unknown:
            like = did_you_mean(name, constructor_options(type(self)))
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}{like}")
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
        return ", ".join(f"{name}={value!r}" for name, value in values.items())

    def check_input(self, x: Tensor, argument: str = "x", shape: str = "[B, T, d_model]") -> None:
        """Raise ArgumentError unless x has this shape, with the dtype and on the device of the layer."""
        check_tokens(argument, x, shape, self.d_model, self.norm, self)


def check_tokens(argument: str, x: object, shape: str, width: int, first: nn.Module, layer: nn.Module) -> None:
    """Raise ArgumentError unless x is a tensor of a shape that ends with d_model, with the dtype and on the device of a layer.

    `first` is the part of the layer that receives x. The layer's parameters may have several dtypes; x may have any of them or,
    under autocast, what it converts. Messages show `shape`, in the letters of the layer.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(argument, f"is a {type(x).__name__}, but must be a tensor.")
    if x.dim() < 2 or (x.dim() != 3 and not shape.startswith("[...")) or x.shape[-1] != width:
        raise ArgumentError(argument, f"has shape {list(x.shape)}, but must be {shape} with d_model = {width}.")
    if x.layout is not torch.strided:
        raise ArgumentError(argument, f"has the layout {x.layout}, but must be a dense tensor, {torch.strided}.")
    expected = check_device(argument, x, layer if next(first.parameters(), None) is None else first).dtype
    if x.dtype == expected:
        return
    if x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return
    if x.dtype not in {parameter.dtype for parameter in layer.parameters() if parameter.is_floating_point()}:
        raise ArgumentError(argument, f"has dtype {x.dtype}, but must have that of the layer, {expected}: convert one of them.")


def check_device(argument: str, x: Tensor, part: nn.Module) -> Tensor:
    """Return a parameter of the module that receives x; raise ArgumentError unless x is on its device."""
    parameter = next(part.parameters())
    # A hook of accelerate moves the inputs and parameters of an offloaded module.
    if x.device != parameter.device and not hasattr(part, "_hf_hook"):
        raise ArgumentError(argument, f"is on {x.device}, but must be on {parameter.device}, like the parameters that read it.")
    return parameter
