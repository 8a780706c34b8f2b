"""Streams at different positions that are continued together."""

from typing import Any

import pytest
import torch

from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU
from lineartime.layers.streams import RaggedState, take_streams, tensors_of

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


@pytest.mark.parametrize("token_shift", [False, True])
def test_a_state_of_another_layer_is_named_when_streams_are_joined(token_shift: bool) -> None:
    layer, other = build(token_shift), build(not token_shift)
    with pytest.raises(ArgumentError, match=r"^states is a \w+, but FLASH needs a \w+: give it the state that"):
        layer.join_streams([layer.init_state(1), other.init_state(1)])


def test_no_streams_can_be_joined_and_stepped_but_not_no_states() -> None:
    layer = build(False)
    streams = layer.join_streams([layer.init_state(0)])
    assert layer.step(torch.zeros(0, 1, D_MODEL, dtype=torch.float64), streams).shape == (0, 1, D_MODEL)
    with pytest.raises(ArgumentError, match="states is empty"):
        layer.join_streams([])


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
