"""FLASH between its two projections: the tiles against the definition and against plain PyTorch.

C = 4 and tiles of 8 tokens in most tests, so that sequences have several tiles, and tiles several chunks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import assert_same_with_gradients, kept_bytes
from tests.ops.cases import CASES, CHUNK, D_QK, D_VALUE, NORMALIZATIONS, assert_same, near, options_of, packing_of
from tests.pairs import every_pair
from torch import Tensor

from lineartime.layers import FLASH, set_backend
from lineartime.machine import using_threads
from lineartime.ops import attend, tiles
from lineartime.ops.mixed_chunk import MixedChunkOptions
from lineartime.ops.packing import Packing
from lineartime.ops.tiles import Inputs, Projected, attend_projected

pytestmark = pytest.mark.usefixtures("compiler")
TILED = [name for name in CASES if "prefix" not in name]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_TOKENS", 8)


def by_definition(projected: Projected, packing: Packing, options: MixedChunkOptions, rotated: int) -> Tensor:
    """The formulas of tiles.py with `attend`."""
    tokens, bias, gamma, beta, output, linear = projected
    tokens = tokens if bias is None else tokens + bias
    d_value = (tokens.shape[1] - gamma.shape[1]) // 2
    gate, v, y = tokens.split([d_value, d_value, gamma.shape[1]], 1)
    maps = torch.addcmul(beta, F.silu(y)[:, None], gamma)
    q_quad, k_quad, *of_tokens = (packing.rotate(maps, rotated) if rotated else maps).unbind(1)
    if linear is not None:  # queries that are given are scaled already
        options = replace(options, scales=options.scales._replace(sum=torch.ones_like, prefix=None))
    out = F.silu(gate) * attend(q_quad, k_quad, *(linear or of_tokens), F.silu(v), packing, options)[0]
    return out if output is None else F.linear(out, output)


def by_tiles(projected: Projected, packing: Packing, options: MixedChunkOptions, rotated: int) -> Tensor:
    return attend_projected(projected, packing, options, rotated)[0]


def inputs_of(
    count: int, *, chunk: int = CHUNK, d_qk: int = D_QK, d_value: int = D_VALUE, dense: bool = False, linear: bool = False
) -> list[Tensor]:
    """Tokens, gamma, beta, bias by distance; with the dense maps around, the bias and the weight; linear queries and keys."""
    shapes = [(count, 2 * d_value + d_qk), (4, d_qk), (4, d_qk), (2 * chunk - 1,)]
    shapes += [(2 * d_value + d_qk,), (3, d_value)] * dense + [(count, d_qk)] * 2 * linear
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def values_and_gradients(
    form: Callable[..., Tensor], inputs: list[Tensor], packing: Packing, options: MixedChunkOptions, rotated: int = D_QK,
    dense: bool = False,
) -> list[Tensor]:  # fmt: skip
    leaves = [x.detach().requires_grad_() for x in inputs]
    tokens, gamma, beta, bias, *rest = leaves
    added, output = (rest.pop(0), rest.pop(0)) if dense else (None, None)
    projected = Projected(tokens, added, gamma, beta, output, (rest[0], rest[1]) if rest else None)
    out = form(projected, packing, replace(options, bias=near(bias)), rotated)
    weights = (torch.arange(out.numel()) * 7 % 17 - 8).view_as(out)  # integers, exact in every dtype
    return [out, *torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True)]


@pytest.mark.usefixtures("small_tiles", "poisoned_memory")
@every_pair(
    case=TILED,
    causal=[False, True],
    normalization=NORMALIZATIONS,
    rotated=[D_QK, 4, 0],
    parts=[(False, False), (True, False), (False, True), (True, True)],
)
def test_values_and_gradients_are_the_definition(
    case: str, causal: bool, normalization: Any, rotated: int, parts: tuple[bool, bool]
) -> None:
    """With and without the dense maps around, and with queries and keys of the linear part that are not those of Z."""
    packing, (dense, linear) = CASES[case](), parts
    inputs = inputs_of(packing.count, dense=dense, linear=linear)
    options = options_of(CHUNK, causal, normalization=normalization)
    found = values_and_gradients(by_tiles, inputs, packing, options, rotated, dense)
    assert_same(found, values_and_gradients(by_definition, inputs, packing, replace(options, backend="oracle"), rotated, dense))


@pytest.mark.usefixtures("small_tiles")
def test_bias_of_scores_may_be_left_out() -> None:
    packing, (tokens, gamma, beta, _) = CASES["ragged"](), inputs_of(34)
    projected, options = Projected(tokens, None, gamma, beta), options_of(CHUNK, True)
    assert_same([by_tiles(projected, packing, options, D_QK)], [by_definition(projected, packing, options, D_QK)])


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The largest error, relative to the largest value, by the dtype that is computed in."""


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_errors_are_within_tolerance_and_at_most_twice_those_of_plain_pytorch(dtype: torch.dtype, causal: bool) -> None:
    rounded = [x.to(dtype) for x in inputs_of(400, chunk=64, d_qk=32, d_value=48)]
    packing, options = packing_of(2, 200), options_of(64, causal, d_qk=32)
    truth = values_and_gradients(by_definition, [x.double() for x in rounded], packing, options, 32)
    tiled, plain = (values_and_gradients(form, rounded, packing, options, 32) for form in (by_tiles, by_definition))
    for true, ours, theirs in zip(truth, tiled, plain, strict=True):
        error, plain_error = ((x.double() - true).abs().max() / true.abs().max() for x in (ours, theirs))
        assert ours.dtype == dtype
        assert error < TOLERANCES[dtype]
        assert error < 2 * plain_error + TOLERANCES[dtype] / 20


def test_same_bits_come_twice_and_threads_change_nothing_but_rounding() -> None:
    for dtype in (torch.float32, torch.float64):
        inputs, packing = [x.to(dtype) for x in inputs_of(600, chunk=64, d_qk=16, d_value=24)], packing_of(2, 300)
        alone, again = (values_and_gradients(by_tiles, inputs, packing, options_of(64, True, d_qk=16), 16) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
    with using_threads(7):
        together, again = (values_and_gradients(by_tiles, inputs, packing, options_of(64, True, d_qk=16), 16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
    assert_same(alone, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan_and_large_inputs_do_not_overflow(dtype: torch.dtype) -> None:
    tokens, gamma, beta, bias = (x.to(dtype) for x in inputs_of(8))
    tokens[0, 0], tokens[0, 1], tokens[1, 0], tokens[7, -1] = -1e4, 1e4, math.nan, math.nan
    out = by_tiles(Projected(tokens, None, gamma, beta), packing_of(1, 8), options_of(CHUNK, True, bias), rotated=0)
    assert out[0, 0].abs() < 1e-25
    assert out[1, 0].isnan()
    assert out[7].isnan().all()
    assert out[:4].isnan().sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_later_tokens_however_large_change_no_bit(dtype: torch.dtype) -> None:
    """Scores that overflow once squared stand behind the mask."""
    tokens, gamma, beta, bias = (x.to(dtype) for x in inputs_of(40, chunk=8))
    packing, huge = packing_of(1, 40, ends=[0, 3, 29, 40]), torch.finfo(dtype).max ** (1.0 if dtype == torch.float16 else 0.6)
    options = options_of(8, True, bias)
    before = by_tiles(Projected(tokens, None, gamma, beta), packing, options, D_QK)
    for end in (21, 26):
        later = torch.where(torch.arange(40)[:, None] < end, tokens, huge * tokens.sign())
        assert torch.equal(by_tiles(Projected(later, None, gamma, beta), packing, options, D_QK)[:end], before[:end])


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_memory")
@every_pair(normalization=NORMALIZATIONS, rotated=[D_QK, 4, 0], linear=[True, False], tile_tokens=[8, 1024])
def test_streams_that_begin_with_whole_chunks_are_the_definition(
    normalization: Any, rotated: int, linear: bool, tile_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE_TOKENS", tile_tokens)
    sizes = [CHUNK, 6 * CHUNK, 3 * CHUNK, 4 * CHUNK + 1]
    tokens, gamma, beta, bias, *given = inputs_of(3 * sum(sizes), linear=linear)
    options = options_of(CHUNK, True, bias, normalization=normalization)
    whole = Projected(tokens, None, gamma, beta, None, (given[0], given[1]) if linear else None)
    expected = by_definition(whole, packing_of(3, sum(sizes)), replace(options, backend="oracle"), rotated)
    summary, outputs, start = torch.zeros(3, D_QK, D_VALUE, dtype=torch.float64), [], 0
    for size in sizes:
        own = [x.view(3, sum(sizes), -1)[:, start : start + size].flatten(0, 1) for x in (tokens, *given)]
        piece = whole._replace(tokens=own[0], linear=(own[1], own[2]) if linear else None)
        packing = packing_of(3, size, position=torch.full((3,), start))
        before = summary.clone()
        out, after = attend_projected(piece, packing, options, rotated, summary)
        assert after is not None
        assert torch.equal(summary, before)
        outputs.append(out.view(3, size, -1))
        summary, start = after, start + size
    torch.testing.assert_close(torch.cat(outputs, 1).flatten(0, 1), expected, atol=1e-11, rtol=0)


def test_tiles_read_the_streams_of_a_layer_where_they_begin_with_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lengths = FLASH(8, d_qk=4, chunk_size=CHUNK, causal=True, initial_scores="unit").double(), []
    monkeypatch.setattr(
        tiles, "attend_projected", lambda *inputs: (lengths.append(inputs[1].longest), attend_projected(*inputs))[1]
    )
    sizes = [3, 5, CHUNK, 0, 1, 7, 30, 3, 30]
    x, results = torch.randn(2, sum(sizes), 8, dtype=torch.float64), []
    for backend in ("torch", "tiled", "auto"):
        set_backend(layer, backend)
        state, outputs = layer.init_state(2), []
        with torch.no_grad():
            for piece in x.split(sizes, 1):
                out, state = layer.extend(piece, state)
                outputs.append(out)
        results.append([torch.cat(outputs, 1), state.summary, state.keys[:, :, :2], state.values[:, :2], state.position])
    assert lengths == [CHUNK, 30] * 2
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], atol=1e-11, rtol=0)
    lengths.clear()
    layer.extend(x[:, :CHUNK])[0].sum().backward()
    assert lengths == [], "a gradient needs plain PyTorch"


# What PyTorch must know -----------------------------------------------------------------------------------------------


def test_neither_rotated_maps_nor_scores_nor_the_gated_output_are_kept() -> None:
    tokens, gamma, beta, bias = (x.float().requires_grad_() for x in inputs_of(512, chunk=64, d_qk=32, d_value=32))
    output, packing, options = torch.randn(3, 32, requires_grad=True), packing_of(1, 512), options_of(64, True, bias, d_qk=32)

    def kept(form: Callable[..., Tensor], output: Tensor | None) -> int:
        return kept_bytes(lambda: form(Projected(tokens, None, gamma, beta, output), packing, options, 32))[1]

    inputs, attended, states, small = 512 * 96, 512 * 32, 8 * 32 * 32, 4 * 64 * 64
    rotations = 2 * 512 * 16  # the packing's, which all layers share
    alone = kept(by_tiles, None)
    assert alone < 4 * (inputs + attended + states + rotations + small)
    assert kept(by_definition, None) > 2 * alone
    assert kept(by_tiles, output) == alone + output.nbytes


def test_pytorch_can_check_and_compile_it() -> None:
    tokens, gamma, beta, bias, added, output = (x.float().requires_grad_() for x in inputs_of(24, dense=True))
    chunks, table = tokens.detach().view(6, CHUNK, -1).requires_grad_(), torch.randn(CHUNK, CHUNK, requires_grad=True)
    least = Inputs(
        chunks, None, gamma, beta, None, torch.randn(2, 3, CHUNK, D_QK // 2), torch.arange(6) % 3, torch.full((1, 1), 0.3),
        torch.ones(6), torch.tensor([0, 1, 1, 1, 2, 2]), None, None, None, False, 3, 0.5, True,
    )  # fmt: skip
    linear = torch.randn(2, 6, CHUNK, D_QK, requires_grad=True)
    most = least._replace(projection_bias=added, bias=table, output=output, linear=linear)
    for inputs in (least, least._replace(bias=table, causal=False), most):
        torch.library.opcheck(tiles._fused.operator, (*inputs, True))
    kept = torch.randn(6, CHUNK, D_VALUE), torch.randn(6, D_QK, D_VALUE)
    strided = chunks.detach().transpose(0, 1).contiguous().transpose(0, 1)
    for inputs, width, wanted in ((least, D_VALUE, [True, False, True, True, False, False, False]), (most, 3, [True] * 7)):
        fixed = [x.detach() if isinstance(x, Tensor) else x for x in inputs._replace(projected=strided)]
        torch.library.opcheck(tiles._fused.backward, (torch.randn(6, CHUNK, width), *kept, *fixed, wanted))

    options = options_of(CHUNK, True)

    def run(*x: Tensor) -> Tensor:
        return by_tiles(Projected(x[0], None, *x[1:3]), packing_of(2, 12), replace(options, bias=near(x[3])), D_QK)

    leaves = (tokens, gamma, beta, bias)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same_with_gradients(compiled(*leaves), run(*leaves), leaves, atol=1e-5)


def test_second_derivative_is_refused_with_what_to_do() -> None:
    tokens, gamma, beta, _ = (x.requires_grad_() for x in inputs_of(8))
    out = by_tiles(Projected(tokens, None, gamma, beta), packing_of(1, 8), options_of(CHUNK, False), rotated=0)
    refused = r"backend 'tiled' can be differentiated only once: .* set_backend\(model, 'torch'\)"
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(out.sum(), gamma, create_graph=True)


@pytest.mark.parametrize("enabled", [False, True])
def test_tiles_compute_in_the_dtype_of_autocast(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype is chosen before autocast is turned off: otherwise, a bf16 layer would compute in fp32."""
    seen, fused = [], tiles._fused
    monkeypatch.setattr(tiles, "_fused", lambda inputs: (seen.append(inputs.projected.dtype), fused(inputs))[1])
    layer = FLASH(16, d_qk=8, chunk_size=CHUNK)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        layer(torch.randn(1, 9, 16)).sum().backward()
    assert seen == [torch.bfloat16 if enabled else torch.float32]
