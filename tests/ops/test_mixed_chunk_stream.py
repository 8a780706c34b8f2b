"""Attention of streams, by chunks and to a cache of all tokens, cut anywhere and at any positions, against the definition."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.cases import CHUNK, D_QK, D_VALUE, NORMALIZATIONS, bias_of, maps_of, near, options_of, packing_of
from tests.pairs import every_pair
from torch import Tensor

from lineartime import native
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, set_backend
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.mixed_chunk import MixedChunkOptions, MixedChunkState, attend, attend_cached, mixed_chunk_state
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache

LONGEST = 70


def empty_state(chunk_size: int | None, streams: int = 1, dtype: torch.dtype = torch.float64) -> MixedChunkState | KVCache:
    like = torch.zeros((), dtype=dtype)
    if chunk_size is not None:
        return mixed_chunk_state(streams, chunk_size, D_QK, D_VALUE, like)
    return KVCache(
        torch.zeros(streams, dtype=torch.long), like.new_zeros(streams, 0, D_QK), like.new_zeros(streams, 0, D_VALUE)
    )


def read(maps: list[Tensor], packing: Packing, options: MixedChunkOptions, state: Any) -> tuple[Tensor, Any]:
    if options.chunk_size is None:
        q, k, v = maps
        return attend_cached(q, k, v, packing, options, state)
    return attend(*maps, packing, options, state)


def whole(maps: list[Tensor], packing: Packing, options: MixedChunkOptions) -> Tensor:
    return attend(*(maps if len(maps) == 5 else (*maps[:2], None, None, maps[2])), packing, options)[0]


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 7) | st.just(1), st.booleans()), min_size=1, max_size=9),
    chunk_size=st.sampled_from([CHUNK, None]),
    activation=st.sampled_from(ACTIVATIONS),
    normalization=st.sampled_from(NORMALIZATIONS),
    biased=st.booleans(),
    gradients=st.booleans(),
)
def test_streams_in_any_pieces_with_and_without_padding_are_the_definition(
    pieces: list[tuple[int, bool]], chunk_size: int | None, activation: Any, normalization: Any, biased: bool, gradients: bool
) -> None:
    """After the first piece with padding, the streams are at different positions. Padding holds no number."""
    mask = torch.cat([torch.rand(3, size) > 0.4 * padded for size, padded in pieces], 1)
    total, bias = mask.shape[1], bias_of(chunk_size, LONGEST) if biased else None
    maps = [x.view(3, total, x.shape[1]) for x in maps_of(3 * total, chunk_size)]
    leaves = [*maps, *([] if bias is None else [bias])]
    for x in leaves:
        x.requires_grad_(gradients)
    named: dict[str, Any] = {"activation": activation, "normalization": normalization}
    state, outputs, start = empty_state(chunk_size, 3), [], 0
    with torch.set_grad_enabled(gradients):
        for size, padded in pieces:
            here = slice(start, start := start + size)
            real = mask[:, here]
            packing = packing_of(3, size, position=state.position, mask=real if padded else None)
            own = [packing.pack(x[:, here].masked_fill(~real[..., None], torch.nan)) for x in maps]
            out, state = read(own, packing, options_of(chunk_size, True, bias, **named), state)
            outputs.append(packing.unpack(out))
    assert torch.equal(state.position, mask.sum(1))
    packing = packing_of(3, total, mask=mask)
    oracle = options_of(chunk_size, True, bias, backend="oracle", **named)
    found, expected = torch.cat(outputs, 1), packing.unpack(whole([packing.pack(x) for x in maps], packing, oracle))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    if gradients and mask.any():
        direction = torch.randn_like(found)
        results = (
            torch.autograd.grad((y * direction).sum(), leaves, materialize_grads=True, allow_unused=True)
            for y in (found, expected)
        )
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def step_of(maps: list[Tensor], state: Any, bias: Tensor | None = None) -> tuple[Tensor, Any]:
    packing = packing_of(len(state), 1, position=state.position)
    return read(maps, packing, MixedChunkOptions(CHUNK, True, SCALES, bias=None if bias is None else near(bias)), state)


SCALES = options_of(CHUNK, True).scales


def test_token_is_written_into_the_memory_of_the_state_unless_a_gradient_needs_the_old_one() -> None:
    state: Any = empty_state(CHUNK, 2)
    memory = [x.data_ptr() for x in state.tensors()]
    for _ in range(2 * CHUNK + 1):
        _, state = step_of(maps_of(2), state)
    assert [x.data_ptr() for x in state.tensors()] == memory
    before = state.clone()
    q, *others = maps_of(2)
    step_of([q.requires_grad_(), *others], state)
    assert all(torch.equal(one, other) for one, other in zip(before.tensors(), state.tensors(), strict=True))


def test_step_can_be_recorded() -> None:
    """A CUDA graph repeats the same operations on the same memory: no shape may depend on a position."""
    state, bias, maps, outputs = empty_state(CHUNK, 2), bias_of(CHUNK), [x.view(2, 9, -1) for x in maps_of(18)], []
    memory = [x.data_ptr() for x in state.tensors()]
    torch._dynamo.reset()
    compiled = torch.compile(step_of, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for place in range(9):
            out, state = compiled([x[:, place].clone() for x in maps], state, bias)
            outputs.append(out)
    assert [x.data_ptr() for x in state.tensors()] == memory
    assert state.position.tolist() == [9, 9]
    expected = whole([x.flatten(0, 1) for x in maps], packing_of(2, 9), options_of(CHUNK, True, bias, backend="oracle"))
    torch.testing.assert_close(torch.stack(outputs, 1).flatten(0, 1), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("chunk_size", [CHUNK, None])
def test_idle_streams_keep_their_bits(chunk_size: int | None) -> None:
    state: Any = empty_state(chunk_size, 3)
    for counts in ([6, 2, 5], [1, 0, 1], [0, 0, 4], [3, 0, 9]):
        before = state.clone()
        mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        packing = packing_of(*mask.shape, position=state.position, mask=mask)
        _, state = read(maps_of(packing.count, chunk_size), packing, options_of(chunk_size, True), state)
        for old, new in zip(before.tensors(), state.tensors(), strict=True):
            for row in (torch.tensor(counts) == 0).nonzero()[:, 0].tolist():
                n = slice(int(before.position[row])) if chunk_size is None and old.dim() > 1 else ...
                assert torch.equal(old[row][n], new[row][n])


@pytest.mark.parametrize("size", [1, 600])
@pytest.mark.parametrize("autocast", [False, True])
def test_states_accumulate_in_float32_also_under_autocast(size: int, autocast: bool) -> None:
    # 1 + 1 + ... stops at 256 in bfloat16.
    ones = torch.ones(600, 1, dtype=torch.float32 if autocast else torch.bfloat16)
    state: Any = mixed_chunk_state(1, 1, 1, 1, like=ones)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for piece in ones.split(size):
            packing = packing_of(1, size, position=state.position)
            out, state = read([0 * piece, *[piece] * 4], packing, options_of(1, True, d_qk=2), state)
    assert out.dtype == torch.bfloat16
    assert state.summary.dtype == torch.float32
    assert state.summary.item() == 600.0


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@every_pair(dtype=list(TOLERANCES), normalization=NORMALIZATIONS, chunk_size=[CHUNK, None], biased=[True, False])
def test_tokens_one_by_one_are_as_exact_as_their_dtype(
    dtype: torch.dtype, normalization: Any, chunk_size: int | None, biased: bool
) -> None:
    maps, bias = maps_of(3 * 23, chunk_size, dtype), bias_of(chunk_size).to(dtype) if biased else None
    packing, named = packing_of(3, 23), {"normalization": normalization}
    wide = None if bias is None else bias.double()
    exact = whole([x.double() for x in maps], packing, options_of(chunk_size, True, wide, backend="oracle", **named))
    state, outputs = empty_state(chunk_size, 3, dtype), []
    for place in range(23):
        packing, own = packing_of(3, 1, position=state.position), [x.view(3, 23, -1)[:, place] for x in maps]
        out, state = read(own, packing, options_of(chunk_size, True, bias, **named), state)
        assert out.dtype == dtype
        outputs.append(out)
    assert (torch.stack(outputs, 1).flatten(0, 1) - exact).abs().max() < TOLERANCES[dtype] * exact.abs().max()


def test_without_functions_in_cpp_plain_pytorch_runs_and_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    native.native_functions.cache_clear()
    layer, x = FLASH(8, d_qk=4, chunk_size=CHUNK, causal=True), torch.randn(1, 3 * CHUNK, 8)
    with torch.no_grad():
        expected = layer(x)
        set_backend(layer, "tiled")
        found, _ = layer.extend(x, layer.init_state(1))
        with pytest.raises(ArgumentError, match="cannot run here: LINEARTIME_NATIVE is 0; use 'auto' or 'torch'"):
            layer(x)
    native.native_functions.cache_clear()
    torch.testing.assert_close(found, expected)
