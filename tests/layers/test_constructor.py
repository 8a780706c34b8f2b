"""How every layer is built: where its parameters are made, drawn anew and shown, and that no argument is without effect."""

import copy
import zlib
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.definitions import assert_drawn_alike
from torch import Tensor, nn

import lineartime
from lineartime.foreign.mixers import ForeignFLASH, ForeignGAU
from lineartime.layers import FLASH, CrossGAU, LearnedPositions, RMSNorm, RotaryBias, ScaledSin, ScaleNorm, TableBias
from lineartime.layers.attention import MultiHeadMixer
from lineartime.layers.residual import LayerOptions, ResidualLayer, constructor_options
from lineartime.models.config import KINDS
from lineartime.ops.activations import FUNCTIONS, SOFTMAXES

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
    assert_drawn_alike(drawn.state_dict(), built.state_dict(), SPREAD)


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


# What the options do --------------------------------------------------------------------------------------------------

# For each argument that is not true or false, another value than its default and the other arguments it needs to matter.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "d_qk": (64, {}),
    "expansion": (3, {}),
    "chunk_size": (2, {"n_buckets": 2, "causal": True}),
    "activation": ("softmax", {}),
    "normalization": ("paper", {}),
    "norm": ("scalenorm", {}),
    "norm_eps": (0.9, {}),
    "rotary_width": (4, {}),
    "bias_form": ("buckets", {}),
    "max_length": (16, {"features": "cos", "chunk_size": 2}),
    "n_heads": (2, {}),
    "dropout": (0.5, {}),
    "stride": (3, {}),
    "n_largest": (2, {}),
    "window": (2, {}),
    "n_global": (4, {"window": 2, "block_size": 1}),
    "block_size": (1, {"n_global": 1, "n_random": 1}),
    "n_random": (1, {"block_size": 1}),
    "n_landmarks": (5, {}),
    "convolution": (0, {}),
    "local": ("overlapping", {"chunk_size": 2}),
    "features": ("relu", {"chunk_size": 2}),
    "n_buckets": (4, {}),
    "n_rounds": (1, {}),
    "rotated": ("features", {}),
    "initial_scores": ("unit", {}),
    "n_nets": (2, {"chunk_size": 2}),
    "d_state": (5, {}),
    "memory": ("mesa", {"chunk_size": 2}),
}


def output(layer: type[nn.Module], arguments: dict[str, Any]) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """What a layer computes, and its parameters. Those of the same name and shape are the same whatever else there is."""
    torch.manual_seed(0)
    module = layer(D_MODEL, **arguments)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            rows = parameter.flatten(1) if parameter.dim() > 1 else parameter.view(1, -1)
            constants = torch.where((rows == rows[:, :1]).all(1, keepdim=True), rows, 0.0)  # no draws, whose order may change
            parameter.copy_(constants.view_as(parameter) + 0.5 * torch.randn(parameter.shape, generator=generator))
    torch.manual_seed(1)
    x = 3 * torch.randn(2, 10, D_MODEL) + 1
    return module(x, x) if layer is CrossGAU else module(x), parameters


def arguments_of(layer: type[nn.Module]) -> list[str]:
    # `causal_sums` changes what a Performer costs, not what it computes: see tests/baselines/test_kernel_attention.py; device
    # and dtype have a test of their own below.
    left_out = {"causal_sums", "device", "dtype"}
    if any(getattr(layer, why, None) is not None for why in ("why_not_causal", "why_only_causal")):
        left_out.add("causal")  # the opposite is an error
    return [name for name in constructor_options(layer) if name not in left_out]


@pytest.mark.parametrize("layer", [*LAYERS, CrossGAU])
def test_every_argument_changes_something(layer: type[nn.Module]) -> None:
    accepted, allowed = constructor_options(layer), arguments_of(layer)
    n_heads = 3 if issubclass(layer, MultiHeadMixer) else 4
    for name in allowed:
        value, context = (not accepted[name].default, {}) if accepted[name].type is bool else OTHER[name]
        assert accepted[name].default != value, name
        base = {argument: own for argument, own in {"n_heads": n_heads, **context}.items() if argument in allowed}
        plain, before = output(layer, base)
        other, after = output(layer, {**base, name: value})
        assert not torch.allclose(plain, other, atol=1e-3), name
        other.square().sum().backward()
        for parameter_name, parameter in after.items():
            is_new = parameter_name not in before or before[parameter_name].shape != parameter.shape
            if is_new and parameter.numel() > 0:
                assert parameter.grad is not None, (name, parameter_name)
                assert parameter.grad.any(), (name, parameter_name)


@pytest.mark.parametrize("layer", [ForeignFLASH, ForeignGAU])
def test_every_activation_differs_from_the_others(layer: type[nn.Module]) -> None:
    outputs = [output(layer, {"activation": activation})[0] for activation in (*FUNCTIONS, *SOFTMAXES)]
    for one, other in combinations(outputs, 2):
        assert not torch.allclose(one, other, atol=1e-3)


def test_unknown_option_is_named_by_the_class_with_options_like_it() -> None:
    with pytest.raises(TypeError, match=r"^FLASH\(\) got an unexpected keyword argument 'd_kq' \(did you mean d_qk\?\)$"):
        FLASH(32, d_kq=16)  # type: ignore[call-arg]


def test_layer_of_a_user_may_take_options_that_it_does_not_list() -> None:
    class Takes(FLASH):
        def __init__(self, d_model: int, **options: Any) -> None:
            self.own = options.pop("own", 1)
            super().__init__(d_model, **options)

    assert Takes(32, own=3, d_qk=16).own == 3


@pytest.mark.parametrize(("norm", "scale"), [(ScaleNorm(), [1.0]), (RMSNorm(2), [1.0, 2.0])])
def test_norm_divides_by_the_root_mean_square_and_scales(norm: torch.nn.Module, scale: list[float]) -> None:
    x, by = torch.tensor([[3.0, 4.0]]), torch.tensor(scale)
    norm.load_state_dict({name: by.reshape(value.shape) for name, value in norm.state_dict().items()})
    torch.testing.assert_close(norm(x), x / (12.5 + 1e-5) ** 0.5 * by)


@pytest.mark.parametrize("norm", [ScaleNorm(), RMSNorm(8)])
def test_large_half_precision_inputs_do_not_overflow(norm: torch.nn.Module) -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its square is beyond float16
    torch.testing.assert_close(norm(x), torch.ones(1, 8, dtype=torch.float16))
