"""Where the parameters of a layer are made, and how those of its dense maps are drawn."""

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.ops.dense import dense


class FactoryOptions(TypedDict, total=False):
    """Where parameters are made, as in torch.nn: on which device, and in which dtype; None for PyTorch's defaults."""

    device: torch.device | str | int | None
    dtype: torch.dtype | None


def factory(options: Mapping[str, Any]) -> FactoryOptions:
    """The `FactoryOptions` among a layer's options."""
    return FactoryOptions(device=options.get("device"), dtype=options.get("dtype"))


class Dense(nn.Linear):
    """A linear map whose weights are drawn from N(0, 0.02), with biases 0 (arXiv 2202.10447, appendix B).

    Args:
        in_features: the width of inputs.
        *widths: the width of outputs; several for maps that are computed together, one behind the other in the output.
        **factory: where the parameters are made.
    """

    def __init__(self, in_features: int, *widths: int, **factory: Unpack[FactoryOptions]) -> None:
        super().__init__(in_features, sum(widths), **factory)
        self.widths = widths

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., the sum of the widths]."""
        return dense(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Draw weights and biases anew."""
        super().reset_parameters()  # so that a seed gives the weights it always gave, which came after these draws
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


def reset_parts(module: nn.Module) -> None:
    """Draw the parameters of all parts of a module anew."""
    for part in module.children():
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            reset_parts(part)
        else:
            reset()
