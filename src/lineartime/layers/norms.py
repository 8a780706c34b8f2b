"""The norms of layers. Shapes: d model width."""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack, override

from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.dense import FactoryOptions
from lineartime.ops.precision import acc_dtype

Norm = Literal["layernorm", "scalenorm", "rmsnorm"]
NORMS: tuple[str, ...] = get_args(Norm)


class LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm, also for parameters in another dtype than x: FSDP gathers them in bf16 for an x in float32."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], in the dtype of x.

        PyTorch's kernel for a CPU sums the gradients of weight and bias over all tokens in the dtype of its input.
        """
        wide = x.to(acc_dtype(x)) if x.device.type == "cpu" and torch.is_grad_enabled() else x
        weight, bias = [None if part is None else part.to(wide.dtype) for part in (self.weight, self.bias)]
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
        """Set the scalar to one."""
        nn.init.ones_(self.g)

    def extra_repr(self) -> str:
        """The options, shown when the norm is printed."""
        return f"eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], computed in float32 or better: the square of 1,000 does not fit float16."""
        wide = x.to(acc_dtype(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.g).to(x.dtype)


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * g with a learned g in R^d: [..., d] -> [..., d] (arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float = 1e-5, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """The options, shown when the norm is printed."""
        return f"{len(self.weight)}, eps={self.eps}"

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], computed in float32 or better."""
        wide = x.to(acc_dtype(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


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
    check_choice("norm", norm, NORMS)
    if not 0 < eps < 1:
        raise ArgumentError("norm_eps", f"is {eps}, but must be above 0 and below 1.")
    if norm == "layernorm":
        return LayerNorm(d_model, eps, **factory)
    return ScaleNorm(eps, **factory) if norm == "scalenorm" else RMSNorm(d_model, eps, **factory)
