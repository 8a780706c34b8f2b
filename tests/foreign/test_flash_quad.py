"""The unit of FLASHQuad_pytorch against what it computed in float64, which tests/assets/make_flash_quad.py saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.foreign import from_flash_quad

STORED = load_file(Path(__file__).parents[1] / "assets" / "flash_quad.safetensors")


def weights_of(case: str, prefix: str = "") -> dict[str, Tensor]:
    start = f"{case}.weight."
    return {prefix + name.removeprefix(start): tensor for name, tensor in STORED.items() if name.startswith(start)}


@pytest.mark.parametrize("case", ["scale_norm", "layer_norm", "causal"])
def test_values_and_gradients_are_those_of_the_published_unit(case: str) -> None:
    """At its longest sequence and below, where it divides by the same number, and with padding."""
    unit = from_flash_quad(weights_of(case, "encoder.layer.0."), causal=case == "causal")
    x, mask, direction, out, gradient = (STORED[f"{case}.{name}"] for name in ("x", "mask", "direction", "out", "gradient"))
    x.requires_grad_()
    found = unit(x, mask=mask)
    torch.testing.assert_close(found[mask.bool()], out[mask.bool()], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(torch.autograd.grad((found * direction).sum(), x)[0], gradient, atol=1e-10, rtol=1e-10)


def test_weights_that_do_not_fit_are_named() -> None:
    weights = weights_of("scale_norm")
    for unfit, message in (
        ({}, "lack uv.weight, which FLASHQuad_pytorch has"),
        (weights_of("causal", "0.") | weights_of("causal", "1."), "hold 2 units of FLASHQuad_pytorch, '0.' and 1 more: give"),
        ({**weights, "more": torch.zeros(1)}, "hold 'more', which FLASHQuad_pytorch does not have"),
        ({**weights, "w": torch.zeros(2047)}, "biases of 1024 tokens, but ours have .* at most 512"),
    ):
        with pytest.raises(LineartimeError, match=message):
            from_flash_quad(unfit)
    with pytest.raises(ArgumentError, match="max_length is 8, the length of this GAU's table"):
        from_flash_quad(weights)(torch.randn(1, 9, 4, dtype=torch.float64))
