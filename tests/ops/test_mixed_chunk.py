"""Mixed chunk attention and, without chunks, GAU's, against the definition: whole sequences, and streams cut anywhere."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.definitions import assert_same_function
from tests.ops.cases import CASES, CHUNK, D_QK, D_VALUE, NORMALIZATIONS, bias_of, maps_of, near, options_of, packing_of
from tests.pairs import every_pair
from torch import Tensor

from lineartime import native
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU, set_backend
from lineartime.ops import mixed_chunk
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.context import ContextGroup
from lineartime.ops.mixed_chunk import (
    MixedChunkOptions,
    MixedChunkState,
    Scales,
    attend,
    attend_cached,
    attention_weights,
    mixed_chunk_state,
    reciprocal,
)
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache


def attended(packing: Packing, options: MixedChunkOptions, *maps: Tensor) -> Tensor:
    """The attention of q_quad, k_quad, q_lin, k_lin, v or, without chunks, q, k, v."""
    out, _ = attend(*(maps if len(maps) == 5 else (*maps[:2], None, None, maps[2])), packing, options)
    return out


@every_pair(
    case=CASES,
    chunk_size=[CHUNK, None],
    causal=[False, True],
    activation=ACTIVATIONS,
    normalization=NORMALIZATIONS,
    biased=[True, False],
    backend=["torch", "auto"],
)
def test_values_and_gradients_are_the_definition(
    case: str, chunk_size: int | None, causal: bool, activation: Any, normalization: Any, biased: bool, backend: Any
) -> None:  # fmt: skip
    packing = CASES[case]()
    causal, chunk_size = causal or packing.prefix is not None, CHUNK if normalization == "paper_sum" else chunk_size

    def run(chosen: Any, *inputs: Tensor) -> Tensor:
        maps, bias = (inputs[:-1], inputs[-1]) if biased else (inputs, None)
        options: dict[str, Any] = {"activation": activation, "normalization": normalization, "backend": chosen}
        return attended(packing, options_of(chunk_size, causal, bias, **options), *maps)

    inputs = [*maps_of(packing.count, chunk_size), *([bias_of(chunk_size)] if biased else [])]
    assert_same_function(lambda *x: run(backend, *x), lambda *x: run("oracle", *x), *inputs)


@pytest.mark.parametrize("backend", ["oracle", "torch"])
def test_definition_is_the_formula_of_the_paper(backend: Any) -> None:
    """By masks over all pairs: t sees the tokens of its chunk up to itself, and the chunks before."""
    q_quad, k_quad, q_lin, k_lin, v = maps_of(11)
    t, j = torch.arange(11)[:, None], torch.arange(11)
    near, far, distance = (j <= t) & (j // CHUNK == t // CHUNK), j // CHUNK < t // CHUNK, (j - t).clamp(1 - CHUNK, CHUNK - 1)
    bias = bias_of(CHUNK)
    weights = (q_quad @ k_quad.mT / math.sqrt(D_QK) + bias[distance + CHUNK - 1]).relu().square() * near
    expected = (weights / near.sum(1, keepdim=True)) @ v
    expected += (q_lin @ k_lin.mT * far / far.sum(1, keepdim=True).clamp(min=1)) @ v
    options = options_of(CHUNK, True, bias, backend=backend)
    found = attended(packing_of(1, 11), options, q_quad, k_quad, q_lin, k_lin, v)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_published_length_is_a_divisor_inside_the_square() -> None:
    q, v = torch.full((2, 1), 3.0), torch.ones(2, 1)
    for causal, longest, n in ((False, None, 2), (True, 6, 6), (True, None, 512)):
        scales = GAU(4, d_qk=2, causal=causal, normalization="paper", max_length=longest).scales()
        out = attended(packing_of(1, 2), MixedChunkOptions(None, causal, scales), q, q, v)
        torch.testing.assert_close(out, (9 / n) ** 2 * torch.tensor([[1.0 + (not causal)], [2.0]]))


@every_pair(case=["ragged", "left", "pack"], chunk_size=[CHUNK, None], dtype=[torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_its_inputs(case: str, chunk_size: int | None, dtype: torch.dtype) -> None:
    packing = CASES[case]()
    maps = maps_of(packing.count, chunk_size, dtype)
    out = attended(packing, options_of(chunk_size, True), *maps)
    exact = attended(packing, options_of(chunk_size, True, backend="oracle"), *(x.double() for x in maps))
    assert out.dtype == dtype
    assert (out - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


@every_pair(
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    chunk_size=[8, None],
    backend=["torch", "auto"],
    activation=ACTIVATIONS,
    case=["rows", "pack"],
)
def test_later_tokens_however_large_change_no_bit(
    dtype: torch.dtype, chunk_size: int | None, backend: Any, activation: Any, case: str
) -> None:
    """Scores that overflow once squared stand behind the mask."""
    packing = packing_of(1, 40) if case == "rows" else packing_of(1, 40, ends=[0, 3, 29, 40])
    options = options_of(chunk_size, True, bias_of(chunk_size, 40), activation=activation, backend=backend)
    maps, ends = maps_of(40, chunk_size, dtype), (21, 26)  # the first tokens of the second document, or of a row
    before = attended(packing, options, *maps)
    huge = torch.finfo(dtype).max ** 0.5 if dtype != torch.float16 else torch.finfo(dtype).max
    for end in ends:
        after = attended(packing, options, *(torch.where(torch.arange(40)[:, None] < end, x, huge * x.sign()) for x in maps))
        assert torch.equal(after[:end], before[:end])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_slice_of_a_sequence_reads_what_other_processes_hold(
    causal: bool, normalization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, bias = [x.view(2, 4 * CHUNK, -1) for x in maps_of(8 * CHUNK)], bias_of(CHUNK)
    options = options_of(CHUNK, causal, bias, normalization=normalization)
    whole = attended(packing_of(2, 4 * CHUNK), replace(options, backend="oracle"), *(x.flatten(0, 1) for x in maps))
    k_lin, v = (x[:, : 2 * CHUNK] for x in maps[3:])

    def of_the_first(sums: Tensor, group: ContextGroup, reach: str) -> Tensor:
        assert reach == ("before" if causal else "others")
        return k_lin.mT @ v

    monkeypatch.setattr(mixed_chunk, "sum_elsewhere", of_the_first)
    second = packing_of(2, 2 * CHUNK, context=ContextGroup("", rank=1, size=2))
    for backend in ("torch", "oracle"):  # which has no definition of a slice
        part = attended(second, replace(options, backend=backend), *(x[:, 2 * CHUNK :].flatten(0, 1) for x in maps))
        expected = whole.view(2, 4 * CHUNK, -1)[:, 2 * CHUNK :]
        torch.testing.assert_close(part.view(2, 2 * CHUNK, -1), expected, atol=1e-10, rtol=0)


# One row of weights ---------------------------------------------------------------------------------------------------


def weights(products: list[float], activation: str, visible: list[bool] | None = None) -> list[float]:
    hidden = None if visible is None else ~torch.tensor([visible])
    count = torch.tensor([len(products) if visible is None else max(1, sum(visible))])
    scales = Scales(0.5, reciprocal, reciprocal)
    return attention_weights(torch.tensor([products], dtype=torch.float64), hidden, count, None, activation, scales)[0].tolist()


def test_weights_by_hand() -> None:
    assert weights([4.0, -4.0], "relu2") == [2.0, 0.0]  # (4 / 2)^2 / 2 keys
    assert weights([4.0, 9.0], "relu2", [True, False]) == [4.0, 0.0]  # of which one is visible
    assert math.isclose(sum(weights([1.0, 2.0, 3.0], "softmax", [True, True, False])), 1.0)
    for activation in ACTIVATIONS:
        assert weights([1.0, 2.0], activation, [False, False]) == [0.0, 0.0]


def test_oracle_and_tiles_are_chosen_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, ran = GAU(8, d_qk=4), torch.randn(1, 5, 8), []
    monkeypatch.setattr(mixed_chunk.quadratic, "tiled", lambda inputs: (ran.append("tiled"), inputs.v)[1])
    monkeypatch.setattr(mixed_chunk.oracle, "attend", lambda *inputs: (ran.append("oracle"), inputs[4])[1])
    for backend in ("torch", "tiled", "auto", "oracle"):
        set_backend(layer, backend)
        layer(x)
    assert ran == ["tiled", "tiled", "oracle"]


# Streams ---------------------------------------------------------------------------------------------------------------

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
    found, expected = torch.cat(outputs, 1), packing.unpack(attended(packing, oracle, *map(packing.pack, maps)))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    if gradients and mask.any():
        direction = torch.randn_like(found)
        results = (
            torch.autograd.grad((y * direction).sum(), leaves, materialize_grads=True, allow_unused=True)
            for y in (found, expected)
        )
        torch.testing.assert_close(*results, atol=1e-10, rtol=0)


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
    expected = attended(packing_of(2, 9), options_of(CHUNK, True, bias, backend="oracle"), *(x.flatten(0, 1) for x in maps))
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


@pytest.mark.parametrize("size", [None, 1, 600])  # of the pieces of a stream; None for a whole sequence
@pytest.mark.parametrize("autocast", [False, True])
def test_states_and_counts_accumulate_in_float32_also_under_autocast(size: int | None, autocast: bool) -> None:
    # 1 + 1 + ... stops at 256 in bfloat16: the mean over 600 chunks of ones would come out as less than a half.
    ones = torch.ones(600, 1, dtype=torch.float32 if autocast else torch.bfloat16)
    state: Any = None if size is None else mixed_chunk_state(1, 1, 1, 1, like=ones)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for piece in ones.split(size or 600):
            packing = packing_of(1, len(piece), position=None if state is None else state.position)
            out, state = read([0 * piece, *[piece] * 4], packing, options_of(1, True, d_qk=2), state)
    assert out.dtype == torch.bfloat16
    assert out[-1].item() == 1.0
    if state is not None:
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
    exact = attended(packing, options_of(chunk_size, True, wide, backend="oracle", **named), *(x.double() for x in maps))
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
