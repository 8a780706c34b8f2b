"""No dead flag: every argument of every layer changes what the layer computes."""

import zlib
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineartime.foreign.mixers import ForeignFLASH, ForeignGAU
from lineartime.layers import FLASH, CrossGAU
from lineartime.layers.attention import MultiHeadMixer
from lineartime.layers.residual import constructor_options
from lineartime.models.config import KINDS
from lineartime.ops.activations import FUNCTIONS, SOFTMAXES

# For each argument, another value than its default and the other arguments it needs to matter.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "d_qk": (64, {}),
    "expansion": (3, {}),
    "chunk_size": (2, {"n_buckets": 2, "causal": True}),
    "causal": (True, {}),
    "activation": ("softmax", {}),
    "gated": (False, {}),
    "normalization": ("paper", {}),
    "norm": ("scalenorm", {}),
    "norm_eps": (0.9, {}),
    "rope": (False, {}),
    "qk_norm": (True, {}),
    "rotary_width": (4, {}),
    "bias_form": ("buckets", {}),
    "token_shift": (True, {}),
    "relative_bias": (False, {}),
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
    "short_convolution": (False, {}),
    "d_state": (5, {}),
    "memory": ("mesa", {"chunk_size": 2}),
}
LAYERS: list[type[nn.Module]] = [*KINDS["mixer"].values(), *KINDS["feed_forward"].values(), CrossGAU]
D_MODEL, LENGTH = 24, 10


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
    x = 3 * torch.randn(2, LENGTH, D_MODEL) + 1
    return module(x, x) if layer is CrossGAU else module(x), parameters


def arguments_of(layer: type[nn.Module]) -> list[str]:
    # `causal_sums` changes what a Performer costs, not what it computes: see tests/baselines/test_kernel_attention.py; device
    # and dtype have a test of their own below.
    left_out = {"causal_sums", "device", "dtype"}
    if any(getattr(layer, why, None) is not None for why in ("why_not_causal", "why_only_causal")):
        left_out.add("causal")  # the opposite is an error
    return [name for name in constructor_options(layer) if name not in left_out]


@pytest.mark.parametrize("layer", LAYERS)
def test_every_argument_changes_something(layer: type[nn.Module]) -> None:
    accepted, allowed = constructor_options(layer), arguments_of(layer)
    n_heads = 3 if issubclass(layer, MultiHeadMixer) else 4
    for name in allowed:
        value, context = OTHER[name]
        value = not accepted[name].default if isinstance(value, bool) else value
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
