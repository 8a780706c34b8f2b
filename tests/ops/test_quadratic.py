"""The forms of GAU's attention: blocks of queries in plain PyTorch, and tiles for CPUs."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.ops.cases import assert_same, bias_of, maps_of, near, options_of, packing_of
from tests.pairs import every_pair
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.machine import using_threads
from lineartime.native import why_not_native
from lineartime.ops import KVCache, quadratic
from lineartime.ops.mixed_chunk import BLOCK, MixedChunkOptions, attend, attend_cached
from lineartime.ops.packing import Packing


def values_and_gradients(inputs: list[Tensor], packing: Packing, options: MixedChunkOptions) -> list[Tensor]:
    """Of q, k, v and, if there is one, the bias by distance."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    if len(leaves) == 4:
        options = MixedChunkOptions(None, options.causal, options.scales, options.activation, near(leaves[3]), options.backend)
    out, _ = attend(leaves[0], leaves[1], None, None, leaves[2], packing, options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


LENGTH = 2 * BLOCK + 88
MASK = torch.arange(LENGTH) % 7 != 3


@every_pair(
    backend=["tiled", "torch"],
    case=["row", "mask", "pack", "prefix"],
    activation=["relu2", "softmax"],
    causal=[True, False],
    normalization=["count", "paper"],
)
def test_blocks_of_queries_do_not_show(backend: Any, case: str, activation: Any, causal: bool, normalization: Any) -> None:
    """Against all scores at once, of three blocks, the last one short."""
    packing = packing_of(1, LENGTH, mask=MASK[None] if case == "mask" else None, **{
        "pack": {"ends": [0, 30, LENGTH - 20, LENGTH]}, "prefix": {"prefix": [BLOCK + 40]}
    }.get(case, {}))  # fmt: skip
    options = options_of(None, causal, activation=activation, normalization=normalization, backend=backend)
    if activation == "softmax" and backend == "tiled":
        with pytest.raises(ArgumentError, match="backend is 'tiled', which cannot run here: it has no activation 'softmax'"):
            values_and_gradients(maps_of(packing.count, None), packing, options)
        return
    inputs = [*maps_of(packing.count, None), bias_of(None, LENGTH)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, bias = leaves
    position = torch.cat([torch.arange(n) for n in packing.new.tolist()])
    prefix = torch.zeros(1, dtype=torch.long) if packing.prefix is None else packing.prefix
    t, j = position[:, None], position
    visible = (packing.document[:, None] == packing.document) & ((j <= t) | (not causal) | ((t < prefix) & (j < prefix)))
    count, of_document = visible.sum(1, keepdim=True), packing.new[packing.document][:, None]
    score = options.scales.score if options.scales.score is not None else 1 / of_document
    scores = q @ k.mT * score + bias[j - t + LENGTH - 1]
    if activation == "softmax":
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    else:
        weights = scores.relu().square() * visible * options.scales.row(count.double())
    expected = weights @ v
    direction = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    exact = [expected, *torch.autograd.grad((expected * direction).sum(), leaves)]
    assert_same(values_and_gradients(inputs, packing, options), exact)


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


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadratic, "QUERIES", 16)
    monkeypatch.setattr(quadratic, "SCORES", 2048)


@pytest.mark.usefixtures("small_tiles", "compiler")
@every_pair(length=[1, 65], causal=[False, True], case=["rows", "mask", "pack"])
def test_tiled_form_is_the_plain_one_at_ragged_lengths(length: int, causal: bool, case: str) -> None:
    packing = {
        "rows": lambda: packing_of(5, length),
        "mask": lambda: packing_of(5, length, mask=torch.rand(5, length) > 0.3),
        "pack": lambda: packing_of(1, length, ends=[0, length // 2, length // 2, length]),
    }[case]()
    inputs = [*maps_of(packing.count, None), bias_of(None, length)]
    torch.use_deterministic_algorithms(True)  # which also fills fresh memory with NaN
    try:
        tiled, again, plain = (
            values_and_gradients(inputs, packing, options_of(None, causal, backend=backend))
            for backend in ("tiled", "tiled", "torch")
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(tiled, again, strict=True))
    assert_same(tiled, plain)


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
    results = [[out, *torch.autograd.grad(out.square().sum(), leaves)] for out in (run(*leaves), compiled(*leaves))]
    assert_same(*results, 1e-5)
