"""Streams at different positions that are continued together."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lineartime.baselines.gau_multi_head import GAUMultiHead
from lineartime.baselines.gau_ungated import GAUUngated
from lineartime.baselines.linear_elu import LinearELU
from lineartime.baselines.linear_taylor import LinearTaylor
from lineartime.baselines.mhsa_gated import MHSAGated
from lineartime.baselines.performer import Performer
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU, Attention
from lineartime.layers.stepping import SteppingMixer
from lineartime.layers.streams import RaggedState, take_streams, tensors_of
from lineartime.ops.cache import MIN_ROOM

D_MODEL, CHUNK = 16, 4


def build(token_shift: bool) -> FLASH:
    torch.manual_seed(0)
    layer = FLASH(D_MODEL, d_qk=8, chunk_size=CHUNK, causal=True, token_shift=token_shift).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def states_after(layer: FLASH, x: torch.Tensor, lengths: list[int]) -> list[Any]:
    return [layer.extend(x[row : row + 1, :length], None)[1] for row, length in enumerate(lengths)]


@pytest.mark.parametrize("token_shift", [False, True])
def test_a_step_continues_every_stream_in_place_as_it_would_be_continued_alone(token_shift: bool) -> None:
    layer, lengths = build(token_shift), [0, 1, CHUNK, 2 * CHUNK + 3]
    x = torch.randn(4, 20, D_MODEL, dtype=torch.float64)
    before = states_after(layer, x, lengths)
    kept = [tensor.clone() for tensor in tensors_of(tuple(before))]
    streams = layer.join_streams(before)
    places = [tensor.data_ptr() for tensor in tensors_of(streams)]  # what a CUDA graph goes on with
    for step in range(CHUNK + 1):
        at = torch.tensor(lengths) + step
        out = layer.step(x[range(4), at][:, None], streams)
        for row in range(4):
            torch.testing.assert_close(out[row, 0], layer(x[row : row + 1])[0, at[row]], atol=1e-10, rtol=0)
    assert streams.position.tolist() == [length + CHUNK + 1 for length in lengths]
    assert [tensor.data_ptr() for tensor in tensors_of(streams)] == places
    for tensor, value in zip(tensors_of(tuple(before)), kept, strict=True):
        assert torch.equal(tensor, value)


GROWING: dict[str, Callable[..., SteppingMixer[Any, Any]]] = {
    "attention": partial(Attention, n_heads=2),
    "attention with normed queries and keys": partial(Attention, n_heads=2, qk_norm=True),
    "without rope": partial(Attention, n_heads=2, rope=False),
    "gated attention": partial(MHSAGated, n_heads=2),
    "gau": partial(GAU, d_qk=8),
    "gau with a table": partial(GAU, d_qk=8, max_length=160),
    "gau with buckets": partial(GAU, d_qk=8, bias_form="buckets"),
    "gau without a bias": partial(GAU, d_qk=8, relative_bias=False, rope=False),
    "gau as published": partial(GAU, d_qk=8, normalization="paper", max_length=600),
    "gau as ported": partial(GAU, d_qk=8, normalization="paper_bias"),
    "gau with softmax": partial(GAU, d_qk=8, activation="softmax_plus"),
    "gau of several heads": partial(GAUMultiHead, d_qk=8, n_heads=2),
    "gau without a gate": partial(GAUUngated, d_qk=8),
}


SUMS: dict[str, Callable[..., SteppingMixer[Any, Any]]] = {
    "performer": partial(Performer, n_heads=2),
    "performer with rotated features": partial(Performer, n_heads=2, rotated="features"),
    "performer without rope": partial(Performer, n_heads=2, rope=False),
    "linear elu": partial(LinearELU, n_heads=2),
    "linear taylor": partial(LinearTaylor, n_heads=2),
}


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("kind", [*GROWING, *SUMS])
@torch.no_grad()
def test_streams_of_other_layers_are_continued_together(kind: str, token_shift: bool) -> None:
    torch.manual_seed(0)
    layer = {**GROWING, **SUMS}[kind](D_MODEL, causal=True, token_shift=token_shift).double()
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    lengths, steps = [0, 1, 30, 63], 66
    x = torch.randn(4, 130, D_MODEL, dtype=torch.float64)
    before = [layer.extend(x[row : row + 1, :length], None)[1] for row, length in enumerate(lengths)]
    kept = [tensor.clone() for tensor in tensors_of(tuple(before))]
    streams, expected = layer.join_streams(before), layer(x)
    places = [tensor.data_ptr() for tensor in tensors_of(streams)]
    for step in range(steps):  # the room for twice the longest is full after 63 of them
        at = torch.tensor(lengths) + step
        out = layer.step(x[range(4), at][:, None], streams)
        torch.testing.assert_close(out[:, 0], expected[range(4), at], atol=1e-9, rtol=0)
    assert streams.position.tolist() == [length + steps for length in lengths]
    if layer.steps_in_place:
        assert [tensor.data_ptr() for tensor in tensors_of(streams)] == places
    for tensor, value in zip(tensors_of(tuple(before)), kept, strict=True):
        assert torch.equal(tensor, value)


BOTH: dict[str, Callable[..., SteppingMixer[Any, Any]]] = {"flash": partial(FLASH, d_qk=8, chunk_size=16), **GROWING, **SUMS}


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("kind", BOTH)
@torch.no_grad()
def test_separated_streams_are_the_states_of_all_tokens_read(kind: str, token_shift: bool) -> None:
    torch.manual_seed(0)
    layer = BOTH[kind](D_MODEL, causal=True, token_shift=token_shift).double()
    for parameter in layer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    lengths, steps = [0, 1, 7, 30], 19  # the open chunks then hold 3, 4, 10 and 1 tokens; groups are of 8
    x = torch.randn(4, 60, D_MODEL, dtype=torch.float64)
    streams = layer.join_streams([layer.extend(x[row : row + 1, :length], None)[1] for row, length in enumerate(lengths)])
    for step in range(steps):
        layer.step(x[range(4), torch.tensor(lengths) + step][:, None], streams)
    states = layer.separate_streams(streams)
    for row, length in enumerate(lengths):
        expected = layer.extend(x[row : row + 1, : length + steps], None)[1]
        assert states[row].position == expected.position
        for found, wanted in zip(tensors_of(states[row]), tensors_of(expected), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)
    kept = [tensor.clone() for tensor in tensors_of(tuple(states))]
    layer.step(x[:, -1:], streams)  # in place
    for found, wanted in zip(tensors_of(tuple(states)), kept, strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(ArgumentError, match=r"^streams is a .*, but this \w+ needs a \w+"):
        layer.separate_streams(layer.init_state(1))


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_one_of_many_streams_holds_no_memory_of_the_others_and_a_step_no_graph(kind: str, token_shift: bool) -> None:
    layer, x = BOTH[kind](D_MODEL, causal=True, token_shift=token_shift), torch.randn(8, 5, D_MODEL)
    with torch.no_grad():
        streams = layer.join_streams([layer.extend(x[row, None, :3], None)[1] for row in range(8)])
    assert not layer.step(x[:, 3:4], streams).requires_grad
    for state in layer.separate_streams(streams):
        for tensor in tensors_of(state):
            assert not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.nbytes  # which torch.save writes


@torch.no_grad()
def test_a_step_in_half_precision_overflows_no_sooner_than_the_whole_sequence() -> None:
    torch.manual_seed(0)
    layer, x = FLASH(D_MODEL, d_qk=8, chunk_size=8, causal=True, initial_scores="unit"), torch.randn(2, 9, D_MODEL).half()
    layer.to_gate_value_base.weight[-8:] *= 15
    layer.to_gate_value_base.weight[32:64] *= 1e-3
    layer.gamma[:2] = 60.0
    layer.half()
    streams = layer.join_streams([layer.init_state(2)])
    stepped = torch.cat([layer.step(x[:, place, None], streams) for place in range(9)], 1)
    whole = layer(x)
    assert whole.isfinite().all()
    torch.testing.assert_close(stepped, whole, atol=0.05, rtol=0.02)


def test_a_step_beyond_a_table_of_biases_is_named() -> None:
    layer = GAU(8, d_qk=4, causal=True, max_length=3)
    streams = layer.join_streams([layer.init_state(1), layer.extend(torch.zeros(1, 2, 8), None)[1]])
    layer.step(torch.zeros(2, 1, 8), streams)
    with pytest.raises(ArgumentError, match=r"max_length is 3, .* but the sequence has 4 tokens"):
        layer.step(torch.zeros(2, 1, 8), streams)


@pytest.mark.parametrize("token_shift", [False, True])
def test_a_state_of_another_layer_is_named_when_streams_are_joined(token_shift: bool) -> None:
    layer, other = build(token_shift), build(not token_shift)
    with pytest.raises(ArgumentError, match=r"^states is a \w+, but FLASH needs a \w+: give it the state that"):
        layer.join_streams([layer.init_state(1), other.init_state(1)])


SMALL: dict[str, Callable[..., SteppingMixer[Any, Any]]] = {
    "flash": partial(FLASH, d_qk=4, chunk_size=CHUNK),
    "flash of another width": partial(FLASH, d_qk=8, chunk_size=CHUNK),
    "gau": partial(GAU, d_qk=4),
    "gau of another width": partial(GAU, d_qk=8),
    "attention": partial(Attention, n_heads=2),
    "attention with more heads": partial(Attention, n_heads=4),
    "performer": partial(Performer, n_heads=2),
    "performer with more heads": partial(Performer, n_heads=4),
}


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("token_shift", [False, True])
@torch.no_grad()
def test_streams_of_another_layer_are_named_when_they_are_stepped(kind: str, token_shift: bool) -> None:
    layer, x = SMALL[kind](D_MODEL, causal=True, token_shift=token_shift), torch.zeros(1, 1, D_MODEL)
    for other in SMALL:
        for shifted in (False, True):
            if (other, shifted) == (kind, token_shift):
                continue
            stranger = SMALL[other](D_MODEL, causal=True, token_shift=shifted)
            streams = stranger.join_streams([stranger.init_state(1)])
            with pytest.raises(ArgumentError, match=r"^streams .*: give it join_streams\(\[state\]\) of the same layer"):
                layer.step(x, streams)
    for nothing in (None, layer.init_state(1), x):
        with pytest.raises(ArgumentError, match=rf"^streams is a \w+.*, but this {type(layer).__name__} needs a \w+Streams"):
            layer.step(x, nothing)


@pytest.mark.parametrize("kind", ["flash", "gau", "attention"])
@torch.no_grad()
def test_streams_begun_in_another_precision_are_continued(kind: str) -> None:
    layer, x = SMALL[kind](D_MODEL, causal=True), torch.randn(1, CHUNK + 3, D_MODEL)
    _, state = layer.extend(x[:, :-1], layer.init_state(1))
    whole, last = layer(x), x[:, -1:]
    for dtype in (torch.float64, torch.bfloat16):
        layer.to(dtype)
        out = layer.step(last.to(dtype), layer.join_streams([state]))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), whole[:, -1:], atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def test_streams_with_other_shifted_features_are_named_when_they_are_stepped() -> None:
    wide = FLASH(D_MODEL, d_qk=8, chunk_size=CHUNK, expansion=1, causal=True, token_shift=True)
    narrow = FLASH(D_MODEL // 2, d_qk=8, chunk_size=CHUNK, expansion=2, causal=True, token_shift=True)
    with pytest.raises(ArgumentError, match="streams has 4 shifted features, but this FLASH needs 8: give it join_"):
        wide.step(torch.zeros(1, 1, D_MODEL), narrow.join_streams([narrow.init_state(1)]))


@pytest.mark.parametrize("kind", ["flash", "gau", "attention"])
@pytest.mark.parametrize("token_shift", [False, True])
@torch.no_grad()
def test_streams_at_positions_of_their_own_are_joined_in_order(kind: str, token_shift: bool) -> None:
    torch.manual_seed(0)
    layer = SMALL[kind](D_MODEL, causal=True, token_shift=token_shift).double()
    x, new = torch.randn(3, 6, D_MODEL, dtype=torch.float64), torch.randn(4, 1, D_MODEL, dtype=torch.float64)
    _, ragged = layer.extend(x, None, torch.arange(6) < torch.tensor([6, 2, 6])[:, None])
    assert isinstance(ragged, RaggedState)
    _, alone = layer.extend(x[:1], None)
    streams = layer.join_streams([ragged, alone])
    assert streams.position.tolist() == [6, 2, 6, 6]
    expected = torch.cat([layer.extend(new[:3], ragged)[0], layer.extend(new[3:], alone)[0]])
    torch.testing.assert_close(layer.step(new, streams), expected, atol=1e-10, rtol=0)
    stranger = SMALL[kind](2 * D_MODEL, causal=True, token_shift=token_shift).init_state(1)
    with pytest.raises(ArgumentError, match=r"^states\.\S+ has shape .*, but \w+ needs "):
        layer.join_streams([RaggedState(((0,),), (stranger,))])


@pytest.mark.parametrize("kind", [*GROWING, "flash", "flash with softmax"])
@pytest.mark.parametrize("token_shift", [False, True])
def test_streams_joined_or_grown_in_inference_mode_can_be_stepped_outside(kind: str, token_shift: bool) -> None:
    kinds = {**GROWING, **SMALL, "flash with softmax": partial(FLASH, d_qk=4, chunk_size=CHUNK, activation="softmax")}
    layer, x = kinds[kind](D_MODEL, causal=True, token_shift=token_shift), torch.randn(1, 1, D_MODEL)
    with torch.inference_mode():
        joined = layer.join_streams([layer.extend(x, None)[1]])
    with torch.no_grad():
        layer.step(x, joined)
    with torch.inference_mode():
        for _ in range(MIN_ROOM):  # until there is new room
            layer.step(x, joined)
    with torch.no_grad():
        layer.step(x, joined)
    assert joined.position.tolist() == [MIN_ROOM + 3]


def test_no_streams_can_be_joined_and_stepped_but_not_no_states() -> None:
    layer = build(False)
    streams = layer.join_streams([layer.init_state(0)])
    assert layer.step(torch.zeros(0, 1, D_MODEL, dtype=torch.float64), streams).shape == (0, 1, D_MODEL)
    for nothing in ([], [RaggedState((), ())]):
        with pytest.raises(ArgumentError, match="states is empty"):
            layer.join_streams(nothing)


def test_streams_at_positions_of_their_own_are_taken_in_any_order() -> None:
    torch.manual_seed(0)
    layer = GAU(8, d_qk=4, causal=True)
    x, new = torch.randn(3, 6, 8), torch.randn(3, 2, 8)
    mask = torch.arange(6) < torch.tensor([6, 2, 4])[:, None]
    _, state = layer.extend(x, None, mask)
    assert isinstance(state, RaggedState)
    expected, _ = layer.extend(new, state)
    rows = torch.tensor([2, 0, 0, 2])
    taken = take_streams(state, rows)
    assert taken.position == [4, 6, 6, 4]
    found, _ = layer.extend(new[rows], taken)
    torch.testing.assert_close(found, expected[rows])
    one = take_streams(state, torch.tensor([2, 2]))
    assert not isinstance(one, RaggedState)  # they are at one position
    torch.testing.assert_close(layer.extend(new[[2, 2]], one)[0], expected[[2, 2]])
    assert layer.extend(new[:0], take_streams(state, rows[:0]))[0].shape == (0, 2, 8)


def test_one_state_instead_of_a_list_is_named() -> None:
    layer = build(False)
    with pytest.raises(ArgumentError, match=r"^states is a \w+, but must be a list of states, .*: write \[state\] for one"):
        layer.join_streams(layer.init_state(1))
