"""How every layer is built: where its parameters are made, drawn anew, and shown."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lineartime
from lineartime.layers import LearnedPositions, RMSNorm, RotaryBias, ScaledSin, ScaleNorm, TableBias
from lineartime.layers.residual import LayerOptions, ResidualLayer, constructor_options
from lineartime.models.config import KINDS

LAYERS: list[type[ResidualLayer]] = [layer for kinds in KINDS.values() for layer in kinds.values()]
D_MODEL = 24


def build(layer: type[ResidualLayer], **options: Any) -> ResidualLayer:
    heads = {"n_heads": 2} if "n_heads" in constructor_options(layer) else {}
    return layer(D_MODEL, **heads, **options)


@pytest.mark.parametrize(
    ("layer", "norm"), [*((layer, "layernorm") for layer in LAYERS), (lineartime.GAU, "scalenorm"), (lineartime.GAU, "rmsnorm")]
)
def test_parameters_are_made_where_and_how_the_constructor_is_told(layer: type[ResidualLayer], norm: str) -> None:
    built = build(layer, device="meta", dtype=torch.float64, norm=norm)
    tensors = [*built.parameters(), *built.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}
    default = build(layer, norm=norm)
    assert {(tensor.device.type, tensor.dtype) for tensor in default.parameters()} == {("cpu", torch.float32)}


SPREAD = ("decay.log_a", "decay.bias", "mixture", "decay", "rate", "removal")
"""Parameters that are not drawn, but begin with other values for each feature or head."""


@pytest.mark.parametrize(("layer", "one_by_one"), [(layer, index % 2 == 0) for index, layer in enumerate(LAYERS)])
def test_layer_made_without_memory_is_drawn_as_the_constructor_draws_it(layer: type[ResidualLayer], one_by_one: bool) -> None:
    built = build(layer)
    drawn = build(layer, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*drawn.parameters(), *drawn.buffers()]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    if one_by_one:  # as FSDP does
        for module in drawn.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    else:
        drawn.reset_parameters()
    for name, tensor in drawn.state_dict().items():
        expected = built.state_dict()[name]
        if (expected == expected.flatten()[0]).all() or name in SPREAD:  # a constant
            assert torch.equal(tensor, expected), name
        else:
            assert not torch.equal(tensor, expected), name
            if not tensor.is_floating_point():  # seeds
                continue
            few = 4 / tensor.numel() ** 0.5
            assert tensor.std() == pytest.approx(float(expected.std()), rel=few), name
            assert tensor.numel() == 1 or tensor.std() > 0.1 * expected.std(), name
            assert abs(tensor.mean()) <= few * tensor.std(), name


PARTS: list[nn.Module] = [ScaleNorm(), RMSNorm(8), ScaledSin(8), TableBias(9), RotaryBias(8), LearnedPositions(9, 8)]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_part_is_drawn_anew_in_place(part: nn.Module) -> None:
    before = copy.deepcopy(part)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.fill_(torch.nan)
    part.reset_parameters()
    for one, other in zip(part.parameters(), before.parameters(), strict=True):
        assert one.isfinite().all()
        assert bool((one == other).all()) == (other.numel() == 1 or bool((other == 1).all()))


@pytest.mark.parametrize("layer", LAYERS)
def test_repr_shows_every_option(layer: type[ResidualLayer]) -> None:
    built = build(layer)
    shown = built.extra_repr()
    assert shown.startswith(f"d_model={D_MODEL}")
    assert repr(built).startswith(f"{layer.__name__}(\n  {shown}\n  (norm): LayerNorm(({D_MODEL},)")
    for name, option in constructor_options(layer).items():
        if name not in LayerOptions.__annotations__ and name != "n_heads":
            default = True if name == "causal" and getattr(layer, "why_only_causal", None) else option.default
            assert f"{name}={default!r}" in shown
