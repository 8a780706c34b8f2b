"""What a layer is given wrongly, as data: each case is one error that names the argument, its value and what is allowed."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.layers.test_mixer_contract import CAUSAL_MECHANISMS, D_MODEL, fresh
from torch import Tensor, nn

from lineartime.baselines import GLA, RWKV7, DeltaNet, Mamba2
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, Attention
from lineartime.layers.cross import CrossGAU
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.mixer import Mixer
from lineartime.layers.residual import constructor_options
from lineartime.models.config import KINDS

MIXERS = KINDS["mixer"]


def refuses(argument: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    """The message begins with the argument, says what it is, and what it must be."""
    with pytest.raises(ArgumentError, match=rf"^{argument}(\.\w+)* (is|has|holds|packs) .*, but ") as raised:
        call(*given, **named)
    assert isinstance(raised.value, ValueError)
    assert "\n" not in str(raised.value)


def integers(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


X = torch.randn(2, 9, D_MODEL)
UNBATCHED = X[0]  # which is read as packed tokens by layers that do not mix them
TOKENS: list[Any] = [X.long(), X.double(), X.to("meta"), X.to_sparse(), None, torch.randn(2, 9, D_MODEL + 1), UNBATCHED]
CU_SEQLENS: list[Any] = [torch.tensor([0.0, 9.0]), integers(0, 9).to("meta"), [0, 9], integers(0, 9)[None], integers(0, 10)]
CU_SEQLENS += [integers(0, 5, 4, 9)]
MASKS: list[Any] = [torch.ones(2, 9), torch.full((2, 9), 2), torch.ones(2, 9, dtype=torch.bool, device="meta")]
MASKS += [torch.ones(2, 8, dtype=torch.bool), [[True] * 9] * 2]
PREFIX_LENGTHS: list[Any] = [torch.tensor([1.0, 2.0]), integers(1, 2).to("meta"), integers(1, 2, 3), integers(-1, 2)]
PREFIX_LENGTHS += [integers(1, 10), [1, 2]]


@pytest.mark.parametrize("name", ["flash", "attention"])  # by chunks and by rows
def test_wrong_inputs_of_a_mixer_are_named(name: str) -> None:
    mixer = fresh(name, causal=True)
    for tokens in TOKENS:
        refuses("x", mixer, tokens)
        refuses("x", mixer.extend, tokens, None)
    for boundaries in CU_SEQLENS:
        refuses("cu_seqlens", mixer, X[:1], None, boundaries)
    refuses("cu_seqlens", mixer, X, None, integers(0, 18))
    for mask in MASKS:
        refuses("mask", mixer, X, mask)
        refuses("mask", mixer.extend, X, None, mask)
    for lengths in PREFIX_LENGTHS if mixer.reads_prefix else ():
        refuses("prefix_lengths", mixer, X, None, None, lengths)
    for size in (1.5, -1, True):
        refuses("batch_size", mixer.init_state, size)


def test_no_mixer_replaces_what_checks_its_arguments() -> None:
    checked = ["forward", "extend", "describe", "init_state", "read_prefix", "shifted"]
    checked += ["check_input", "check_state", "check_prefix", "check_causal"]
    for mixer in MIXERS.values():
        for name in checked:
            assert getattr(mixer, name) is getattr(Mixer, name), f"{mixer.__name__}.{name}: test it as the base is tested"


def wrong_states(name: str, mixer: Mixer) -> Iterator[Any]:
    state = mixer.init_state(2)
    yield from (mixer.init_state(3), vars(state), X, fresh(name, True, token_shift=True).init_state(2))
    yield state.map(lambda x: x.long() if x.is_floating_point() else x.double())
    yield state.map(lambda x: x.to("meta"))
    yield state.map(lambda x: x[..., None])
    yield fresh(name, True, 2 * D_MODEL, **({"d_qk": 12} if hasattr(mixer, "d_qk") else {})).init_state(2)
    if getattr(mixer, "chunk_size", None) and mixer.name != "reformer":  # whose state holds all tokens, whatever its chunk size
        yield fresh(name, True, chunk_size=2 * mixer.chunk_size).init_state(2)


@pytest.mark.parametrize("name", CAUSAL_MECHANISMS)
def test_states_of_anything_else_are_named(name: str) -> None:
    mixer = fresh(name, causal=True)
    for state in wrong_states(name, mixer):
        with pytest.raises(ArgumentError, match=r"^(state(\.\w+)*|x) (is|has) .*, but "):
            mixer.extend(X, state)


# Constructors ---------------------------------------------------------------------------------------------------------

LAYERS: list[type[nn.Module]] = [*MIXERS.values(), MLP, GLU, CrossGAU]
WRONG: dict[Any, list[Any]] = {
    int: [1.5, "8", True, 0, None],
    bool: ["yes", 1],
    float: ["a", True, -0.5, 1.0, float("nan")],
    int | None: [1.5, "8", True, 0],
}
UNROTATED = (DeltaNet, GLA, Mamba2, RWKV7)
ZERO_IS_ALLOWED = {"n_global", "n_random", "convolution"}


@pytest.mark.parametrize("layer", LAYERS)
def test_options_of_the_wrong_type_or_outside_their_range_are_named(layer: type[nn.Module]) -> None:
    options = constructor_options(layer)
    for name, option in options.items():
        for value in WRONG.get(option.type, ["none of them", 1, None]):
            if name not in ("device", "dtype") and not (value == 0 and name in ZERO_IS_ALLOWED):
                refuses(name, layer, 24, **{name: value})
    for width in (1.5, "16", True, 0):
        refuses("d_model", layer, width)
    if layer in MIXERS.values() and not issubclass(layer, UNROTATED):  # an odd rotary width
        argument, odd = ("d_qk", {"d_qk": 7}) if "d_qk" in options else ("n_heads", {"n_heads": 8})
        refuses(argument, layer, 24, **odd)


# Other layers ---------------------------------------------------------------------------------------------------------


def test_wrong_inputs_of_other_layers_are_named() -> None:
    cross = CrossGAU(D_MODEL, d_qk=8)
    for tokens in TOKENS:
        refuses("x", cross, tokens, X)
        refuses("source", cross, X, tokens)
        for layer in (MLP(D_MODEL), GLU(D_MODEL)) if tokens is not UNBATCHED else ():
            refuses("x", layer, tokens)
    for mask in MASKS:
        refuses("mask", cross, X, X, mask)
        refuses("source_mask", cross, X, X, None, mask)


# What stays allowed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flash", "attention"])
def test_autocast_and_layers_of_several_dtypes_take_the_dtypes_that_they_took(name: str) -> None:
    mixer = fresh(name, causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mixer(X.bfloat16()).isfinite().all()
    mixer = mixer.to(torch.bfloat16)
    mixer.norm.float()
    assert mixer(X.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("layer", [FLASH(16, d_qk=8, chunk_size=4), Attention(16, n_heads=2)])
def test_autocast_leaves_float64_as_it_is(layer: Any) -> None:
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArgumentError, match=r"x has dtype torch.float64, but"):
        layer(x)
    double = copy.deepcopy(layer).double()
    expected = double(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(double(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_another_default_device_changes_nothing(causal: bool) -> None:
    layer, x = FLASH(16, d_qk=8, chunk_size=4, rope=False, causal=causal), torch.randn(1, 700, 16)
    boundaries = torch.tensor([*range(0, 301, 3), 700])  # documents of 3 tokens, and one of 400

    def outputs() -> list[Tensor]:
        found = [layer(x), layer(x, cu_seqlens=boundaries)]
        return [*found, layer.extend(x, layer.init_state(1))[0]] if causal else found

    with torch.no_grad():
        expected = outputs()
        with torch.device("meta"):  # C++ would read from the address zero
            found = outputs()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
