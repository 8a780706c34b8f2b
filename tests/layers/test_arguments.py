"""No dead flag: every argument of every layer changes what the layer computes."""

import inspect
import zlib
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineartime.baselines.cosformer import CosFormer
from lineartime.baselines.flash_global import FLASHGlobal
from lineartime.baselines.flash_weighted import FLASHWeighted
from lineartime.baselines.nystromformer import Nystromformer
from lineartime.baselines.reformer import Reformer
from lineartime.foreign import ForeignFLASH, ForeignGAU
from lineartime.layers import FLASH, GAU, Attention, CrossGAU
from lineartime.layers.multi_head import MultiHeadMixer
from lineartime.layers.residual import ResidualLayer, constructor_options
from lineartime.models.config import KINDS
from lineartime.ops.activations import known_activations

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


def left_out_of(layer: type[nn.Module]) -> dict[str, Any]:
    """The arguments, with their defaults, that the bases of a layer have and the layer does not."""
    bases = [base for base in layer.__mro__ if issubclass(base, ResidualLayer) and "__init__" in vars(base)]
    parameters = [parameter for base in bases for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()]
    named = {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    return {name: default for name, default in named.items() if name not in constructor_options(layer)}


def test_an_argument_of_a_base_that_a_layer_leaves_out_is_refused() -> None:
    left_out = {(layer, name): default for layer in LAYERS for name, default in left_out_of(layer).items()}
    assert {(CosFormer, "rotated"), (FLASHGlobal, "initial_scores")} <= set(left_out)
    for (layer, name), default in left_out.items():
        for value in (default, OTHER[name][0]):
            with pytest.raises(TypeError, match=f"'{name}'"):
                layer(D_MODEL, **{name: value})


@pytest.mark.parametrize("layer", [ForeignFLASH, ForeignGAU])
def test_every_activation_differs_from_the_others(layer: type[nn.Module]) -> None:
    outputs = [output(layer, {"activation": activation})[0] for activation in known_activations()]
    for one, other in combinations(outputs, 2):
        assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (GAU, {"activation": "gelu"}, "activation is 'gelu', but must be one of 'relu2'"),
        (FLASHWeighted, {"normalization": "paper_sum"}, "normalization is 'paper_sum', but must be one of 'count', 'paper'"),
        (Attention, {"n_heads": 5}, "n_heads is 5, but must divide d_model = 24"),
        (CrossGAU, {"n_heads": 5, "d_qk": 10}, "n_heads is 5, but must divide expansion \\* d_model = 48"),
        (Attention, {"n_heads": 8}, "n_heads is 8, but d_model / n_heads = 3 must be even"),
        (Reformer, {"n_heads": 2, "n_buckets": 3}, "n_buckets is 3, but must be even"),
        (Nystromformer, {"n_heads": 2, "convolution": 4}, "convolution is 4, but must be an odd number, or 0"),
    ],
)
def test_values_that_are_not_allowed_are_named(layer: type[nn.Module], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(D_MODEL, **arguments)


def test_an_unknown_option_is_named_by_the_class_with_options_like_it() -> None:
    with pytest.raises(TypeError, match=r"^FLASH\(\) got an unexpected keyword argument 'd_kq' \(did you mean d_qk\?\)$"):
        FLASH(32, d_kq=16)  # type: ignore[call-arg]


def test_a_layer_of_a_user_may_take_options_that_it_does_not_list() -> None:
    class Takes(FLASH):
        def __init__(self, d_model: int, **options: Any) -> None:
            self.own = options.pop("own", 1)
            super().__init__(d_model, **options)

    assert Takes(32, own=3, d_qk=16).own == 3
