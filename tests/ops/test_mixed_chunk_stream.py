"""FLASH's attention of streams, cut anywhere and at any positions, against the definition of the causal form."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import every_pair
from torch import Tensor

from lineartime import native
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, set_backend
from lineartime.ops import (
    MixedChunkState,
    gated_mixed_chunk_attention,
    mixed_chunk_attention_extend,
    mixed_chunk_attention_oracle,
    mixed_chunk_state,
)
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.batch import Needs
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.mixed_chunk import cpu
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.mixed_chunk.stream import extend, extend_projected

CHUNK, D_QK, D_VALUE = 4, 6, 5
NORMALIZATIONS = ["count", "paper", "paper_sum"]


def make_inputs(length: int, batch: int = 1) -> list[Tensor]:
    return [torch.randn(batch, length, width, dtype=torch.float64) for width in (D_QK, D_QK, D_QK, D_QK, D_VALUE)]


def make_bias() -> Tensor:
    return torch.randn(CHUNK, CHUNK, dtype=torch.float64)


def empty_state(batch: int = 1) -> MixedChunkState:
    return mixed_chunk_state(batch, CHUNK, D_QK, D_VALUE, like=torch.zeros((), dtype=torch.float64))


def read(inputs: list[Tensor], state: MixedChunkState, mask: Tensor | None, bias: Tensor | None, **options: Any) -> Any:
    """Read a piece of streams as a layer does: its padding holds no number."""
    if mask is None:
        return mixed_chunk_attention_extend(*inputs, state, bias=bias, **options)
    batch = stream_batch(state.position, inputs[-1].shape, mask)
    q_quad, k_quad, q_lin, k_lin, v = (batch.pack(x.masked_fill(~mask[..., None], torch.nan)) for x in inputs)
    rows = None if bias is None else bias.__getitem__
    out, state = extend(q_quad, q_lin, [k_quad, k_lin], v, rows, MixedChunkOptions(CHUNK, True, **options), state, batch)
    return batch.unpack(out), state


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 7) | st.just(1), st.booleans()), min_size=1, max_size=9),
    activation=st.sampled_from(ACTIVATIONS),
    normalization=st.sampled_from(NORMALIZATIONS),
    biased=st.booleans(),
    gradients=st.booleans(),
)
def test_streams_in_any_pieces_with_and_without_padding_are_the_definition(
    pieces: list[tuple[int, bool]], activation: Any, normalization: Any, biased: bool, gradients: bool
) -> None:
    """After the first piece with padding, the streams are at different positions."""
    sizes, options = [size for size, _ in pieces], {"activation": activation, "normalization": normalization}
    inputs, bias = make_inputs(sum(sizes), 3), make_bias() if biased else None
    mask = torch.cat([torch.rand(3, size) > 0.4 * padded for size, padded in pieces], 1)
    leaves = [*inputs, *([] if bias is None else [bias])]
    for x in leaves:
        x.requires_grad_(gradients)
    state, outputs, start = empty_state(3), [], 0
    for size, padded in pieces:
        here = slice(start, start := start + size)
        out, state = read([x[:, here] for x in inputs], state, mask[:, here] if padded else None, bias, **options)
        outputs.append(out)
    out = torch.cat(outputs, 1)
    expected = mixed_chunk_attention_oracle(*inputs, chunk_size=CHUNK, causal=True, mask=mask, bias=bias, **options)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    assert torch.equal(state.position, mask.sum(1))
    if gradients and sum(sizes):
        direction = torch.randn_like(out)
        found, exact = (
            torch.autograd.grad((y * direction).sum(), leaves, materialize_grads=True, allow_unused=True)
            for y in (out, expected)
        )
        torch.testing.assert_close(found, exact, atol=1e-10, rtol=0)


def test_token_is_written_into_the_memory_of_the_state_unless_a_gradient_needs_the_old_one() -> None:
    state = empty_state(2)
    memory = [x.data_ptr() for x in state.tensors()]
    for _ in range(2 * CHUNK + 1):
        _, state = mixed_chunk_attention_extend(*make_inputs(1, 2), state)
    assert [x.data_ptr() for x in state.tensors()] == memory
    before = state.clone()
    q, *others = make_inputs(1, 2)
    mixed_chunk_attention_extend(q.requires_grad_(), *others, state)
    assert all(torch.equal(one, other) for one, other in zip(before.tensors(), state.tensors(), strict=True))


def test_step_can_be_recorded() -> None:
    """A CUDA graph repeats the same operations on the same memory: no shape may depend on a position."""
    state, bias = empty_state(2), make_bias()
    memory = [x.data_ptr() for x in state.tensors()]
    torch._dynamo.reset()
    compiled = torch.compile(mixed_chunk_attention_extend, backend="aot_eager", fullgraph=True, dynamic=False)
    inputs, outputs = make_inputs(2 * CHUNK + 1, 2), []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for start in range(2 * CHUNK + 1):
            out, state = compiled(*(x[:, start : start + 1].clone() for x in inputs), state, bias=bias)
            outputs.append(out)
    assert [x.data_ptr() for x in state.tensors()] == memory
    assert state.position.tolist() == [2 * CHUNK + 1] * 2
    whole = mixed_chunk_attention_oracle(*inputs, chunk_size=CHUNK, causal=True, bias=bias)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [1, 600])
def test_states_accumulate_in_float32(size: int) -> None:
    # 1 + 1 + ... stops at 256 in bfloat16.
    ones = torch.ones(1, 600, 1, dtype=torch.bfloat16)
    state = mixed_chunk_state(1, 1, 1, 1, like=ones)
    for piece in ones.split(size, 1):
        _, state = mixed_chunk_attention_extend(0 * piece, piece, piece, piece, piece, state)
    assert state.summary.dtype == torch.float32
    assert state.summary.item() == 600.0


# From the projected tokens of a layer ---------------------------------------------------------------------------------


def make_projected(length: int, d_qk: int = D_QK, dtype: torch.dtype = torch.float64) -> Projected:
    shapes = (3, length, 2 * D_VALUE + d_qk), (4, d_qk), (4, d_qk)
    return Projected(*(torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes))


def read_projected(
    projected: Projected, sizes: list[int], bias: Tensor | None, rope: bool, options: MixedChunkOptions, backend: Any = "auto"
) -> tuple[Tensor, MixedChunkState]:
    dtype, d_qk, outputs = projected.gamma.dtype, projected.d_qk, []
    needs = Needs(CHUNK, rotary_width=d_qk if rope else None, dtype=torch.promote_types(dtype, torch.float32))
    state = mixed_chunk_state(3, CHUNK, d_qk, D_VALUE, like=projected.gamma)
    for piece in projected.tokens.split(sizes, 1):
        tokens, batch = projected._replace(tokens=piece.contiguous()), stream_batch(state.position, piece.shape, needs=needs)
        rows = None if bias is None else bias.__getitem__
        out, state = extend_projected(tokens, rows, batch, options, state, backend)
        outputs.append(out)
    return torch.cat(outputs, 1), state


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@every_pair(dtype=list(TOLERANCES), normalization=NORMALIZATIONS, rope=[True, False], biased=[True, False])
def test_tokens_one_by_one_are_the_gated_definition(dtype: torch.dtype, normalization: Any, rope: bool, biased: bool) -> None:
    tolerance = TOLERANCES[dtype]
    projected, bias = make_projected(23, dtype=dtype), make_bias().to(dtype) if biased else None
    exact = Projected(*(x.double() for x in projected[:3] if x is not None))
    options: dict[str, Any] = {"positions": torch.arange(23) if rope else None, "normalization": normalization}
    options["bias"] = None if bias is None else bias.double()
    truth = gated_mixed_chunk_attention(*exact[:3], chunk_size=CHUNK, causal=True, backend="oracle", **options)
    out, _ = read_projected(projected, [1] * 23, bias, rope, MixedChunkOptions(CHUNK, True, "relu2", normalization))
    assert out.dtype == dtype
    assert (out - truth).abs().max() < tolerance * truth.abs().max()


@every_pair(normalization=NORMALIZATIONS, case=[(6, True, True), (6, False, False), (5, True, False)], tile_tokens=[8, 1024])
def test_tiles_read_whole_chunks_of_streams_as_the_plain_form_does(
    normalization: Any, case: tuple[int, bool, bool], tile_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces that begin and end inside chunks, with one chunk, or several tiles of them; d_qk 5 has no C++ functions."""
    d_qk, biased, rope = case
    monkeypatch.setattr(cpu, "TILE_TOKENS", tile_tokens)
    lengths, form = [], cpu.extend_gated

    def counted(projected: Projected, *rest: Any) -> tuple[Tensor, Tensor]:
        lengths.append(projected.tokens.shape[1])
        return form(projected, *rest)

    monkeypatch.setattr(cpu, "extend_gated", counted)
    sizes = [3, 6, CHUNK, 0, 7 * CHUNK + 1, 2, 30]
    projected, bias = make_projected(sum(sizes), d_qk), make_bias() if biased else None
    options = MixedChunkOptions(CHUNK, True, "relu2", normalization)
    expected, plain = read_projected(projected, sizes, bias, rope, options, "torch")
    for backend in ("auto", "tiled"):
        found, state = read_projected(projected, sizes, bias, rope, options, backend)
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)
        torch.testing.assert_close(state.summary, plain.summary, atol=1e-11, rtol=0)
        assert torch.equal(state.position, plain.position)
    can_run = native.why_not_native() is None and d_qk % 2 == 0
    assert sorted(set(lengths)) == ([CHUNK, 6 * CHUNK, 7 * CHUNK] if can_run else []), "whole chunks must be read by tiles"


def test_streams_that_need_gradients_are_read_in_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "extend_gated", None)
    projected = make_projected(CHUNK)
    projected.tokens.requires_grad_()
    out, _ = read_projected(projected, [CHUNK], None, False, MixedChunkOptions(CHUNK, causal=True))
    out.sum().backward()
    assert projected.tokens.grad is not None


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
