"""Linear projections and embeddings with the initialisation of the paper, and the device and dtype of their parameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from typing_extensions import Unpack

from lineartime.native import NATIVE_DTYPES, native_functions
from lineartime.ops.modes import acc_dtype, common_dtype, is_plain, is_traced, is_trained_compiled, look_up, widens

SOURCE = Path(__file__).with_name("dense.cpp")
MAX_ROWS = 32
"""The maximum number of rows for which the C++ function is at least as fast as matrix libraries."""


class FactoryOptions(TypedDict, total=False):
    """Where parameters are made, as in torch.nn: on which device, and in which dtype; None for PyTorch's defaults."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None


def factory(options: Mapping[str, Any]) -> FactoryOptions:
    """The `FactoryOptions` among a layer's options."""
    return FactoryOptions(device=options.get("device"), dtype=options.get("dtype"))


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: [..., K], weight [N, K], bias [N] -> [..., N]. On a CPU, a few rows are computed in C++.

    For one row, the time is that of reading the matrix. Matrix libraries, which are made for many rows, then reach only a third
    to a half of the memory bandwidth.
    """
    if is_traced():  # which would specialise the recorded program to the number of rows
        return F.linear(x, weight, bias)
    width = x.shape[-1]
    few = 0 < x.numel() <= MAX_ROWS * width and x.device.type == "cpu" and x.dtype in NATIVE_DTYPES
    fits = weight.shape[1:] == (width,) and weight.dtype == x.dtype
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:1] and bias.dtype == x.dtype
    functions = native_functions(SOURCE, x.dtype) if few and fits and is_plain(x, weight, bias) else None
    if functions is None and x.dtype == weight.dtype == torch.bfloat16 and widens(x):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if functions is None:
        return F.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    functions.call("dense", x, weight, bias, out, x.numel() // width, width, weight.shape[0])
    return out


@torch.no_grad()
def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 numbers [N, K] and the factors of their rows [N] whose products are nearest to a matrix [N, K]."""
    wide = weight.to(acc_dtype(weight))
    scale = wide.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1, scale)  # of a row of zeros
    return (wide / scale).round_().to(torch.int8), scale[:, 0]


class Dense(nn.Linear):
    """A linear map whose weights are drawn from N(0, 0.02), with biases 0 (arXiv 2202.10447, appendix B).

    Args:
        in_features: the width of the input.
        *widths: the width of the output. Several widths are projections that are computed together and concatenated.
        **factory: the device and dtype of the parameters.
    """

    def __init__(self, in_features: int, *widths: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__(in_features, sum(widths), **factory)
        self.widths = widths

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., the sum of the widths]."""
        return dense(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # keeps the order of random numbers, so that a seed gives the same weights as before
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors that are drawn from N(0, 0.02)."""

    def forward(self, input: Tensor) -> Tensor:
        """Ids, int [...] -> [..., d]."""
        return look_up(self.weight, input)

    def reset_parameters(self) -> None:
        super().reset_parameters()  # keeps the order of random numbers, as in `Dense`
        nn.init.normal_(self.weight, std=0.02)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks or a replaced `forward`, or hooks are registered for all modules."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(forward or module._backward_hooks or module._backward_pre_hooks or torch_module._has_any_global_hook())


def is_untouched(layer: nn.Module) -> bool:
    """Whether a linear map is an unmodified `Dense` without hooks, so that its weights may be used without calling it."""
    plain = type(layer) is Dense and not has_hooks(layer)
    return plain and type(layer.weight) is nn.Parameter and type(layer.bias) is nn.Parameter


def apart(
    layer: nn.Module, x: Tensor, widths: list[int], norm: tuple[Tensor, Tensor | None, bool, float] | None = None
) -> Sequence[Tensor]:
    """The projections that a layer computes together: [N, K] -> [N, width] each.

    In code that is compiled for training, x can be normed here: by weight, bias, whether to subtract the mean, and epsilon.
    Weight and bias become parts of those of the layer, and its bias the weight of a feature that is always 1.
    """
    if not is_trained_compiled() or not is_untouched(layer):
        return tuple(layer(x).split(widths, -1))
    assert isinstance(layer, Dense)
    dtype = common_dtype(x, layer.weight)
    weight, bias = (parameter.to(acc_dtype(parameter)) for parameter in (layer.weight, layer.bias))
    if norm is None:
        rows = F.pad(x.to(dtype), (0, ONES), value=1.0)
    else:
        gain, shift, *how = norm
        rows = _Normed.apply(x, dtype, *how)  # type: ignore[no-untyped-call]
        weight, bias = weight * gain, bias if shift is None else bias + (weight * shift).sum(1)
    weight = torch.cat([weight, bias[:, None], weight.new_zeros(len(bias), ONES - 1)], 1)
    return tuple(_Apart.apply(rows, weight.to(dtype), widths))  # type: ignore[no-untyped-call]


ONES = 8
"""How many features of 1 follow those of a row: one for the bias, and others, of weight 0, which align the rows for GPUs."""


class _Normed(torch.autograd.Function):
    """Rows [N, d] with mean square 1 and, if `centred`, mean 0, before features of 1: [N, d + 8] in another dtype.

    The backward pass reads these, which the product keeps anyway, and not x, which is twice as wide under autocast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, centred: bool, eps: float) -> Tensor:
        x = x.to(acc_dtype(x))
        x = x - x.mean(-1, keepdim=True) if centred else x
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        rows = F.pad((x * scale).to(dtype), (0, ONES), value=1.0)
        ctx.save_for_backward(rows, scale)
        ctx.centred = centred
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, scale = ctx.saved_tensors
        gradient, rows = (x[:, :-ONES].to(scale.dtype) for x in (gradient, rows))
        d_x = gradient - rows * (gradient * rows).mean(-1, keepdim=True)
        return scale * (d_x - gradient.mean(-1, keepdim=True) if ctx.centred else d_x), None, None, None


class _Apart(torch.autograd.Function):
    """Rows [N, K] times the parts of a weight [M, K]: [N, width] each, whose gradients share one tensor [N, M]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(rows, weight)
        return tuple(rows @ part.mT for part in weight.split(widths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        joined, first = rows.new_empty(len(rows), len(weight)), 0
        for part in gradients:  # Inductor writes into such a view where it computes the gradient; for a slice, it copies all
            joined.as_strided(part.shape, joined.stride(), first).copy_(part)
            first += part.shape[1]
        return joined @ weight, joined.mT @ rows, None


def reset_parts(module: nn.Module) -> None:
    """Initialise the parameters of all submodules of a module."""
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            reset_parts(part)
        else:
            reset()
