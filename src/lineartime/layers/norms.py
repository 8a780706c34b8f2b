"""The norms that stand before every layer. Shapes: d model width."""

from typing import Literal

import torch
from torch import Tensor, nn

from lineartime.ops.activations import check_choice

Norm = Literal["layernorm", "scalenorm", "rmsnorm"]
NORMS: tuple[str, ...] = ("layernorm", "scalenorm", "rmsnorm")


class ScaleNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * g with one learned scalar g: [..., d] -> [..., d] (FLASH, arXiv 2202.10447, code 1)."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(1))  # not a scalar: FSDP2 shards rows

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], computed in float32 or better: the square of 1,000 does not fit float16."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.g).to(x.dtype)


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * g with a learned g in R^d: [..., d] -> [..., d] (arXiv 1910.07467)."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d], computed in float32 or better."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def build_norm(norm: Norm, d_model: int) -> nn.Module:
    """The norm of that name for inputs [..., d_model]; ValueError for an unknown name."""
    check_choice("norm", norm, NORMS)
    if norm == "layernorm":
        return nn.LayerNorm(d_model)
    return ScaleNorm() if norm == "scalenorm" else RMSNorm(d_model)
