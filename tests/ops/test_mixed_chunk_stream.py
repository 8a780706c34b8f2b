"""FLASH's attention of streams: against the causal form, and, at different positions, against each stream alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lineartime import native
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, set_backend
from lineartime.ops import mixed_chunk_attention, mixed_chunk_attention_extend, mixed_chunk_state
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.mixed_chunk import tiled, tiles
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.mixed_chunk.step import mixed_chunk_streams, step
from lineartime.ops.mixed_chunk.stream import extend_projected

CHUNK, D_QK, D_VALUE = 4, 6, 5
READ = [0, 1, 3, 4, 11]
"""How many tokens the streams have read before they are joined."""


def make_inputs(length: int, batch: int = 1) -> list[Tensor]:
    return [torch.randn(batch, length, width, dtype=torch.float64) for width in (D_QK, D_QK, D_QK, D_QK, D_VALUE)]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 7), min_size=1, max_size=8),
    activation=st.sampled_from(ACTIVATIONS),
    normalization=st.sampled_from(["count", "paper", "paper_sum"]),
)
def test_streaming_in_any_pieces_is_the_causal_form(cuts: list[int], activation: Any, normalization: Any) -> None:
    inputs, bias = make_inputs(sum(cuts), 2), torch.randn(CHUNK, CHUNK, dtype=torch.float64)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "normalization": normalization}
    state = mixed_chunk_state(2, CHUNK, D_QK, D_VALUE, like=bias)
    pieces, start = [], 0
    for size in cuts:
        piece, state = mixed_chunk_attention_extend(*(x[:, start : start + size] for x in inputs), state, **options)
        pieces.append(piece)
        start += size
    whole = mixed_chunk_attention(*inputs, chunk_size=CHUNK, causal=True, **options)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-10, rtol=0)
    assert state.position == sum(cuts)


@pytest.mark.parametrize("normalization", ["count", "paper", "paper_sum"])
@pytest.mark.parametrize(("d_qk", "biased", "rotated"), [(6, True, True), (6, False, False), (5, True, False)])
@pytest.mark.parametrize("tile_tokens", [8, 1024])
def test_tiles_read_whole_chunks_of_streams_as_the_plain_form_does(
    normalization: Any, d_qk: int, biased: bool, rotated: bool, tile_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that begin and end inside chunks, with one chunk, or several tiles of them; d_qk 5 has no C++ functions."""
    monkeypatch.setattr(tiles, "TILE_TOKENS", tile_tokens)
    lengths = []
    form = tiled.extend_gated

    def counted(projected: Projected, *rest: Any) -> tuple[Tensor, Tensor]:
        lengths.append(projected.tokens.shape[1])
        return form(projected, *rest)

    monkeypatch.setattr(tiled, "extend_gated", counted)
    cuts = [3, 6, CHUNK, 0, 7 * CHUNK + 1, 2, 30]
    shapes = (3, sum(cuts), 10 + d_qk), (4, d_qk), (4, d_qk)
    whole, gamma, beta = (torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    bias = torch.randn(CHUNK, CHUNK, dtype=torch.float64) if biased else None
    angles = torch.randn(sum(cuts), d_qk // 2, dtype=torch.float64)
    options = MixedChunkOptions(CHUNK, True, "relu2", normalization)
    states = {form: mixed_chunk_state(3, CHUNK, d_qk, 5, like=gamma) for form in ("torch", "auto", "tiled")}
    start = 0
    for size in cuts:
        here = slice(start, start := start + size)
        rotations = torch.stack([angles[here].cos(), angles[here].sin()]) if rotated else None
        found = {}
        for name, state in states.items():
            before = state.summary.clone()
            tokens = Projected(whole[:, here].contiguous(), gamma, beta)
            found[name], states[name] = extend_projected(tokens, bias, rotations, options, state, name)
            assert torch.equal(state.summary, before)
        for name in ("auto", "tiled"):
            torch.testing.assert_close(found[name], found["torch"], atol=1e-11, rtol=0)
            for one, other in zip(states[name], states["torch"], strict=True):
                torch.testing.assert_close(one, other, atol=1e-11, rtol=0)
    can_run = native.why_not_native() is None and d_qk % 2 == 0
    assert sorted(set(lengths)) == ([CHUNK, 6 * CHUNK, 7 * CHUNK] if can_run else []), "whole chunks must be read by tiles"


def test_streams_that_need_gradients_are_read_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "extend_gated", None)
    whole, gamma, beta = (torch.randn(*shape, dtype=torch.float64) for shape in ((1, CHUNK, 16), (4, 6), (4, 6)))
    state = mixed_chunk_state(1, CHUNK, 6, 5, like=gamma)
    tokens = Projected(whole.requires_grad_(), gamma, beta)
    out, _ = extend_projected(tokens, None, None, MixedChunkOptions(CHUNK, causal=True), state)
    out.sum().backward()
    assert whole.grad is not None


def test_extend_leaves_the_state_it_was_given_as_it_was() -> None:
    inputs = make_inputs(7)
    _, state = mixed_chunk_attention_extend(*inputs, mixed_chunk_state(1, CHUNK, D_QK, D_VALUE, like=inputs[0]))
    before = [x.clone() if isinstance(x, Tensor) else x for x in state]
    mixed_chunk_attention_extend(*make_inputs(9), state)
    for old, new in zip(before, state, strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def test_states_accumulate_in_float32() -> None:
    # 1 + 1 + ... stops at 256 in bfloat16.
    ones = torch.ones(1, 600, 1, dtype=torch.bfloat16)
    state = mixed_chunk_state(1, 1, 1, 1, like=ones)
    assert state.summary.dtype == torch.float32
    _, state = mixed_chunk_attention_extend(0 * ones, ones, ones, ones, ones, state)
    assert state.summary.item() == 600.0


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalization", ["count", "paper", "paper_sum"])
@pytest.mark.parametrize("biased", [False, True])
def test_joined_streams_continue_as_each_would_alone(activation: Any, normalization: Any, biased: bool) -> None:
    options: dict[str, Any] = {"activation": activation, "normalization": normalization}
    options["bias"] = torch.randn(CHUNK, CHUNK, dtype=torch.float64) if biased else None
    inputs = [make_inputs(read + 10) for read in READ]
    empty = mixed_chunk_state(1, CHUNK, D_QK, D_VALUE, like=inputs[0][0])
    alone = [mixed_chunk_attention_extend(*whole, empty, **options)[0] for whole in inputs]

    states = []
    for whole, read in zip(inputs, READ, strict=True):
        states.append(mixed_chunk_attention_extend(*(x[:, :read] for x in whole), empty, **options)[1])
    before = [part.clone() for state in states for part in state if isinstance(part, Tensor)]
    streams = mixed_chunk_streams(states)
    for new in range(10):  # through the end of two chunks
        tokens = [
            torch.cat([whole[part][:, read + new, None] for whole, read in zip(inputs, READ, strict=True)]) for part in range(5)
        ]
        bias = options["bias"]
        row = None if bias is None else bias[streams.position % CHUNK]
        out = step(
            torch.stack(tokens[:4], 1), tokens[4], row, MixedChunkOptions(CHUNK, True, activation, normalization), streams
        )
        expected = torch.cat([whole[:, read + new, None] for whole, read in zip(alone, READ, strict=True)])
        torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    assert streams.position.tolist() == [read + 10 for read in READ]
    after = [part for state in states for part in state if isinstance(part, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "joining must leave the states as they are"


@pytest.mark.parametrize(("chunk_size", "read", "summed"), [(16, 15, 8), (16, 7, 0), (16, 20, 0), (12, 11, 8), (5, 4, 4)])
def test_joining_adds_the_full_groups_of_the_open_chunk_to_the_sums_as_they_are_rounded(
    chunk_size: int, read: int, summed: int
) -> None:
    """A step takes them out of the sums again, by the keys and values that are kept."""
    *keys_and_queries, v = make_inputs(read)
    _, state = mixed_chunk_attention_extend(*keys_and_queries, v, mixed_chunk_state(1, chunk_size, D_QK, D_VALUE, like=v))
    streams = mixed_chunk_streams([state], torch.bfloat16)
    assert streams.keys.dtype == streams.values.dtype == torch.bfloat16
    k_lin, values = streams.keys[:, 1, :summed].double(), streams.values[:, :summed].double()
    torch.testing.assert_close(streams.sums, state.summary + k_lin.mT @ values, atol=1e-12, rtol=0)


def test_a_step_can_be_recorded() -> None:
    """A CUDA graph repeats the same operations on the same memory: no shape may depend on a position."""
    state = mixed_chunk_state(2, CHUNK, D_QK, D_VALUE, like=torch.empty(0, dtype=torch.float64))
    streams = mixed_chunk_streams([state])
    places = [tensor.data_ptr() for tensor in streams]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2 * CHUNK + 1):
            maps, v = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((4, 1, D_QK), (1, D_VALUE)))
            compiled(maps, v, None, MixedChunkOptions(CHUNK, causal=True), streams)
    assert [tensor.data_ptr() for tensor in streams] == places
    assert streams.position.tolist() == [2 * CHUNK + 1] * 2


@pytest.mark.parametrize(("batch", "d_qk", "name"), [(1, D_QK, "k_quad"), (3, D_QK, "k_quad"), (2, D_QK + 1, "k_quad")])
def test_tokens_of_other_streams_than_those_of_the_state_are_refused(batch: int, d_qk: int, name: str) -> None:
    state = mixed_chunk_state(2, CHUNK, D_QK, D_VALUE, like=torch.zeros(()))
    inputs = [torch.randn(batch, 3, width) for width in (d_qk, d_qk, d_qk, d_qk, D_VALUE)]
    with pytest.raises(ArgumentError, match=f"state needs {name} of shape .*N.*, but it is"):
        mixed_chunk_attention_extend(*inputs, state)


@pytest.mark.parametrize("backend", ["triton", "tiled"])
def test_a_backend_that_cannot_run_leaves_streams_to_plain_pytorch(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv(native.SWITCH, "0")
    native.native_functions.cache_clear()
    layer = FLASH(8, d_qk=4, chunk_size=CHUNK, causal=True)
    x = torch.randn(1, 3 * CHUNK, 8)
    with torch.no_grad():
        expected = layer(x)
        set_backend(layer, backend)
        found, _ = layer.extend(x, layer.init_state(1))
    native.native_functions.cache_clear()
    torch.testing.assert_close(found, expected)
