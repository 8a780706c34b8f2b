"""The forms of GAU's attention: blocks of queries in plain PyTorch, and tiles for CPUs."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.definitions import assert_same_with_gradients
from tests.ops.cases import CASES, assert_same, bias_of, maps_of, near, options_of, packing_of
from tests.pairs import every_pair
from torch import Tensor

from lineartime.machine import using_threads
from lineartime.native import why_not_native
from lineartime.ops import KVCache, mixed_chunk, quadratic
from lineartime.ops.mixed_chunk import BLOCK, MixedChunkOptions, attend, attend_cached
from lineartime.ops.packing import Packing


def values_and_gradients(inputs: list[Tensor], packing: Packing, options: MixedChunkOptions) -> list[Tensor]:
    """Of q, k, v and, if there is one, the bias by distance."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if len(leaves) == 4:
        options = replace(options, bias=near(leaves[3]))
    out, _ = attend(leaves[0], leaves[1], None, None, leaves[2], packing, options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


LENGTH = 2 * BLOCK + 88


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and tiles of 4 queries."""
    for module, name, value in ((mixed_chunk, "BLOCK", 4), (quadratic, "QUERIES", 4), (quadratic, "SCORES", 128)):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small_blocks", "poisoned_memory", "compiler")
@every_pair(
    form=[("tiled", "relu2"), ("torch", "relu2"), ("torch", "softmax")],
    case=["chunks", "ragged", "left", "holes", "masked pack", "prefixes, left"],
    causal=[True, False],
    normalization=["count", "paper"],
)
def test_blocks_of_queries_do_not_show(form: tuple[Any, Any], case: str, causal: bool, normalization: Any) -> None:
    (backend, activation), packing = form, CASES[case]()
    causal, inputs = causal or packing.prefix is not None, [*maps_of(packing.count, None), bias_of(None)]
    options = options_of(None, causal, activation=activation, normalization=normalization, backend=backend)
    found, again, expected = (
        values_and_gradients(inputs, packing, each) for each in (options, options, replace(options, backend="oracle"))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert_same(found, expected)


@pytest.mark.parametrize("starts", [(0, 0), (30, 30), (30, 7)])
def test_blocks_of_queries_do_not_show_in_streams(starts: tuple[int, int]) -> None:
    """Against rows of all tokens, of which streams have read some before."""
    total, options = LENGTH + max(starts), options_of(None, True)
    q, k, v = (x.view(2, total, -1) for x in maps_of(2 * total, None))
    bias = bias_of(None, total)
    options = MixedChunkOptions(None, True, options.scales, bias=lambda n: bias[total - n : total + n - 1])
    whole, _ = attend(*(x.flatten(0, 1) for x in (q, k)), None, None, v.flatten(0, 1), packing_of(2, total), options)
    first = torch.arange(max(starts)) < torch.tensor(starts)[:, None]
    state: Any = KVCache(torch.zeros(2, dtype=torch.long), k[:, :0], v[:, :0])
    before = packing_of(2, max(starts), position=state.position, mask=first)
    _, state = attend_cached(*(before.pack(x[:, : max(starts)]) for x in (q, k, v)), before, options, state)
    rest = packing_of(2, LENGTH, position=state.position)
    pieces = [torch.cat([x[row, start : start + LENGTH] for row, start in enumerate(starts)]) for x in (q, k, v)]
    out, _ = attend_cached(*pieces, rest, options, state)
    expected = torch.cat([whole.view(2, total, -1)[row, start : start + LENGTH] for row, start in enumerate(starts)])
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)


@pytest.mark.skipif(why_not_native() is not None, reason="there is no compiler")
@every_pair(
    dtype=[torch.float64, torch.float32, torch.bfloat16],
    positions=[(600, 600), (600, 7), (0, 511)],
    heads=[(), (3,)],
    with_bias=[True, False],
)
def test_token_in_one_pass_is_the_plain_one(
    dtype: torch.dtype, positions: tuple[int, int], heads: tuple[int, ...], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales, n = options_of(None, True, d_qk=10).scales, max(positions) + 1
    bias = bias_of(None, n).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    options = MixedChunkOptions(None, True, scales, bias=near(bias) if with_bias else None)
    own = torch.randn(3, 2, *heads, 10).double()
    k, v = (torch.randn(2, *heads, 700, width).double() for width in (10, 6))
    packing = packing_of(2, 1, position=torch.tensor(positions))

    def attended(dtype: torch.dtype) -> Tensor:
        state = KVCache(torch.tensor(positions), k.to(dtype), v.to(dtype), max(positions))
        with torch.no_grad():
            return attend_cached(own[0].to(dtype), own[1].to(dtype), own[2, ..., :6].to(dtype), packing, options, state)[0]

    found = []
    for threads in (1, 3):
        with using_threads(threads):
            found.append(attended(dtype))
    assert torch.equal(*found)
    passes = Mock(wraps=quadratic.attend_token)
    monkeypatch.setattr(quadratic, "attend_token", passes)
    attended(dtype)
    passes.assert_called_once()
    monkeypatch.setattr(quadratic, "native_functions", lambda *_: None)
    plain, true = attended(dtype), attended(torch.float64)
    error, plain_error = ((x.double() - true).abs().max() / true.abs().max() for x in (found[0], plain))
    assert found[0].dtype == dtype
    assert error <= 2 * plain_error + 8 * torch.finfo(bias.dtype).eps


# Tiles ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_tiled_errors_are_at_most_twice_those_of_plain_pytorch(dtype: torch.dtype, with_bias: bool) -> None:
    inputs, packing = [x.to(dtype) for x in [*maps_of(600, None), *[bias_of(None, 300)] * with_bias]], packing_of(2, 300)
    truth = values_and_gradients([x.double() for x in inputs], packing, options_of(None, True))
    tiled, plain = (
        values_and_gradients(inputs, packing, options_of(None, True, backend=backend)) for backend in ("tiled", "torch")
    )
    for true, ours, theirs in zip(truth, tiled, plain, strict=True):
        error, plain_error = ((x.double() - true).abs().max() / true.abs().max() for x in (ours, theirs))
        assert ours.dtype == dtype
        assert error < 2 * plain_error + torch.finfo(dtype).eps


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan_in_the_tiled_form(dtype: torch.dtype) -> None:
    q, k, v = maps_of(6, None, dtype)
    k[3] = torch.nan
    out, _ = attend(q, k, None, None, v, packing_of(1, 6), options_of(None, True, backend="tiled"))
    assert out[3:].isnan().all()
    assert out[:3].isfinite().all()


@pytest.mark.parametrize("backend", ["tiled", "torch"])
def test_no_scores_are_kept_for_the_backward_pass(backend: Any) -> None:
    maps, kept = [x.requires_grad_() for x in maps_of(2048, None, torch.float32)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        attend(*maps[:2], None, None, maps[2], packing_of(1, 2048), options_of(None, True, backend=backend))
    assert sum(kept) < 2048 * 64 * (1 if backend == "tiled" else 8)  # blocks keep their keys and values


@pytest.mark.usefixtures("compiler")
def test_pytorch_can_check_and_compile_the_tiled_form() -> None:
    leaves = [x.float().requires_grad_() for x in (*maps_of(20, None), bias_of(None, 10))]
    for bias in (leaves[3], None):
        maps = [x.detach().view(2, 10, -1).requires_grad_() for x in leaves[:3]]
        inputs = quadratic.Inputs(*maps, bias, torch.full((2, 10), 0.1), 0.4, True, "relu2")
        torch.library.opcheck(quadratic.tiled.operator, (*inputs, True))
    scales = options_of(None, True).scales

    def run(*x: Tensor) -> Tensor:
        options = MixedChunkOptions(None, True, scales, bias=near(x[3]), backend="tiled")
        return attend(*x[:2], None, None, x[2], packing_of(2, 10), options)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_same_with_gradients(compiled(*leaves), run(*leaves), leaves, atol=1e-5)
