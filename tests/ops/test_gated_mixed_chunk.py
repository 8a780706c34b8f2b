"""FLASH between its dense maps: the tiled form against the definition and against plain PyTorch.

C = 4 and tiles of 8 tokens in most tests, so that sequences have several tiles, and tiles several rows.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.layers import FLASH
from lineartime.machine import using_threads
from lineartime.ops import gated_mixed_chunk_attention
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.context import ContextGroup
from lineartime.ops.make_batch import make_batch
from lineartime.ops.mixed_chunk import attend_projected, chunked, cpu
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected

pytestmark = pytest.mark.usefixtures("compiler")

CHUNK, D_QK, D_VALUE = 4, 6, 5


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE_TOKENS", 8)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """PyTorch's deterministic mode, in which memory that nobody has written to is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def make_inputs(
    batch: int, length: int, *, chunk: int = CHUNK, d_qk: int = D_QK, d_value: int = D_VALUE, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """projected, gamma, beta, bias."""
    torch.manual_seed(length)
    shapes = ((batch, length, 2 * d_value + d_qk), (4, d_qk), (4, d_qk), (chunk, chunk))
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)


def values_and_gradients(inputs: tuple[Tensor, ...], backend: Any, **options: Any) -> list[Tensor]:
    projected, gamma, beta, bias = inputs
    options = {"chunk_size": CHUNK, "positions": torch.arange(projected.shape[1]), "causal": True} | options
    out = gated_mixed_chunk_attention(projected, gamma, beta, bias=bias, backend=backend, **options)
    weights = (torch.arange(out.numel()) * 7 % 17 - 8).view_as(out)  # integers, exact in every dtype
    return [out, *torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)]


def assert_same(a: list[Tensor], b: list[Tensor], atol: float = 1e-10) -> None:
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=0)


@pytest.mark.usefixtures("small_tiles", "poisoned_memory")
@every_pair(length=[0, 1, 4, 5, 17], causal=[False, True], normalization=["count", "paper", "paper_sum"])
def test_tiled_form_is_the_definition(length: int, causal: bool, normalization: Any) -> None:
    inputs = make_inputs(3, length)
    tiled, oracle = (
        values_and_gradients(inputs, backend, causal=causal, normalization=normalization) for backend in ("tiled", "oracle")
    )
    assert_same(tiled, oracle)


@pytest.mark.usefixtures("small_tiles", "poisoned_memory")
@every_pair(causal=[False, True], normalization=["count", "paper", "paper_sum"])
def test_divisors_of_the_tiled_form_count_tokens_that_other_processes_hold(causal: bool, normalization: Any) -> None:
    tokens, gamma, beta, bias = make_inputs(3, 4 * CHUNK)
    projected, options = Projected(tokens, gamma, beta), MixedChunkOptions(CHUNK, causal, normalization=normalization)
    needs = Needs(CHUNK, rotary_width=D_QK, dtype=torch.float64)
    batch = make_batch(tokens.shape, device=tokens.device, needs=needs, context=ContextGroup("", rank=1, size=3))
    gate, heads = projected.heads(batch.rotations)
    outputs = cpu.attend(projected, bias, batch, options), gate * chunked.attend(heads, bias, batch, options)
    results = [[out, *torch.autograd.grad(out.square().sum(), (tokens, gamma, beta, bias))] for out in outputs]
    assert_same(*results)


@pytest.mark.usefixtures("small_tiles", "poisoned_memory")
@pytest.mark.parametrize(
    ("padding", "causal"), [("right", True), ("left", False), ("holes", True), ("holes", False), ("all", True)]
)
def test_tiled_form_is_the_definition_under_masks(padding: str, causal: bool) -> None:
    inputs = make_inputs(3, 21)
    tokens, short = torch.arange(21).expand(3, -1), torch.tensor([[0], [3], [21]])
    masks = {"right": tokens < 21 - short, "left": tokens >= short, "holes": torch.rand(3, 21) > 0.4, "all": tokens < 0}
    options = {
        "mask": masks[padding],
        "causal": causal,
        "positions": torch.arange(21) if padding == "right" else masks[padding].cumsum(1),
    }
    assert_same(values_and_gradients(inputs, "tiled", **options), values_and_gradients(inputs, "oracle", **options))


@pytest.mark.usefixtures("small_tiles", "poisoned_memory")
@every_pair(ends=[[0, 4, 4, 5, 17], [0, 0, 1, 2, 3, 16, 17]], causal=[False, True])
def test_tiled_form_is_the_definition_for_packs(ends: list[int], causal: bool) -> None:
    inputs = make_inputs(1, 17)
    options = {"cu_seqlens": torch.tensor(ends), "causal": causal}
    assert_same(values_and_gradients(inputs, "tiled", **options), values_and_gradients(inputs, "oracle", **options))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("backend", "d_qk"), [("tiled", D_QK), ("auto", 5)])  # plain PyTorch alone has odd widths
def test_bias_and_rotation_may_be_left_out(backend: str, d_qk: int) -> None:
    projected, gamma, beta, _ = make_inputs(2, 11, d_qk=d_qk)

    def run(backend: Any) -> list[Tensor]:
        out = gated_mixed_chunk_attention(
            projected, gamma, beta, chunk_size=CHUNK, positions=None, causal=True, backend=backend
        )
        return [out, *torch.autograd.grad(out.square().sum(), (projected, gamma, beta))]

    assert_same(run(backend), run("oracle"))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("length", "causal"), [(65, False), (257, True)])
def test_tiled_form_is_the_plain_one_at_ragged_lengths(length: int, causal: bool) -> None:
    inputs = make_inputs(2, length, chunk=64, d_qk=16, d_value=24)
    options = {"chunk_size": 64, "causal": causal}
    assert_same(values_and_gradients(inputs, "tiled", **options), values_and_gradients(inputs, "torch", **options), 1e-9)


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The largest error, relative to the largest value, by the dtype that is computed in."""


@pytest.mark.parametrize(("dtype", "causal"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_errors_are_within_tolerance_and_at_most_twice_those_of_plain_pytorch(dtype: torch.dtype, causal: bool) -> None:
    exact = tuple(x.detach().to(dtype).double().requires_grad_() for x in make_inputs(2, 200, chunk=64, d_qk=32, d_value=48))
    rounded = tuple(x.detach().to(dtype).requires_grad_() for x in exact)
    options = {"chunk_size": 64, "causal": causal}
    truth = values_and_gradients(exact, "torch", **options)
    tiled, plain = (values_and_gradients(rounded, backend, **options) for backend in ("tiled", "torch"))
    for true, ours, theirs in zip(truth, tiled, plain, strict=True):
        size = true.abs().max()
        error, plain_error = ((x.double() - true).abs().max() / size for x in (ours, theirs))
        assert error < TOLERANCES[dtype]
        assert error < 2 * plain_error + TOLERANCES[dtype] / 20


def test_same_bits_come_twice() -> None:
    inputs = make_inputs(2, 300, chunk=64, d_qk=16, d_value=24, dtype=torch.float32)
    once, again = (values_and_gradients(inputs, "tiled", chunk_size=64) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_number_of_threads_changes_nothing_but_rounding() -> None:
    inputs = make_inputs(2, 300, chunk=64, d_qk=16, d_value=24)
    alone = values_and_gradients(inputs, "tiled", chunk_size=64)
    with using_threads(7):
        together = values_and_gradients(inputs, "tiled", chunk_size=64)
        again = values_and_gradients(inputs, "tiled", chunk_size=64)
    assert_same(alone, together)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan_and_large_inputs_do_not_overflow(dtype: torch.dtype) -> None:
    projected, gamma, beta, bias = (x.detach().to(dtype) for x in make_inputs(1, 8))
    projected[0, 0, 0], projected[0, 0, 1], projected[0, 1, 0], projected[0, 7, -1] = -1e4, 1e4, math.nan, math.nan
    out = gated_mixed_chunk_attention(
        projected, gamma, beta, bias=bias, chunk_size=CHUNK, positions=None, causal=True, backend="tiled"
    )
    assert out[0, 0, 0].abs() < 1e-25
    assert out[0, 1, 0].isnan()
    assert out[0, 7].isnan().all()
    assert out[0, :4].isnan().sum() == 1


BATCHES: dict[str, tuple[int, dict[str, Tensor]]] = {
    "whole chunks": (6 * CHUNK, {}),
    "one token": (1, {}),
    "ragged": (23, {}),
    "masked": (17, {"mask": torch.arange(17).expand(2, -1) < torch.tensor([[11], [17]])}),
    "a pack": (19, {"cu_seqlens": torch.tensor([0, 5, 5, 14, 19])}),
    "a prefix": (18, {"prefix_lengths": torch.tensor([7, 0])}),
}


def with_dense_maps(
    inputs: tuple[Tensor, ...], batch: Batch, causal: bool, projection_bias: Tensor, output: Tensor, backend: Any
) -> list[Tensor]:
    tokens, gamma, beta, bias = inputs
    options = MixedChunkOptions(CHUNK, causal)
    packed = Projected(batch.pack(tokens), gamma, beta, projection_bias)
    out = batch.unpack(attend_projected(packed, bias, batch, options, backend, output))
    weighted = (out * (1 + torch.arange(out.numel()) % 7).view_as(out)).sum()
    return [out, *torch.autograd.grad(weighted, (*inputs, projection_bias, output))]


@pytest.mark.usefixtures("small_tiles", "poisoned_memory")
@pytest.mark.parametrize(("name", "causal"), [(name, causal) for name in BATCHES for causal in {True, name == "a prefix"}])
def test_dense_maps_with_tiles_are_the_definition_between_them(name: str, causal: bool) -> None:
    length, parts = BATCHES[name]
    inputs, output = make_inputs(1 if "cu_seqlens" in parts else 2, length), torch.randn(3, D_VALUE, dtype=torch.float64)
    needs = Needs(CHUNK, rotary_width=D_QK, dtype=torch.float64)
    batch = make_batch(inputs[0].shape, **parts, device=inputs[0].device, needs=needs)
    maps = (torch.randn(inputs[0].shape[-1], dtype=torch.float64).requires_grad_(), output.requires_grad_())
    results = [with_dense_maps(inputs, batch, causal, *maps, backend) for backend in ("tiled", "oracle")]
    assert_same(*results)


def test_gated_output_is_not_kept_for_an_output_map() -> None:
    inputs, output = make_inputs(2, 64), torch.randn(3, D_VALUE, dtype=torch.float64, requires_grad=True)
    needs = Needs(CHUNK, rotary_width=D_QK, dtype=torch.float64)
    batch = make_batch(inputs[0].shape, device=inputs[0].device, needs=needs)

    def attend(output: Tensor | None = None) -> Tensor:
        tokens, gamma, beta, bias = inputs
        return attend_projected(Projected(tokens, gamma, beta), bias, batch, MixedChunkOptions(CHUNK), "tiled", output)

    gated_bytes = 2 * 64 * D_VALUE * 8
    assert kept_bytes(lambda: attend(output)) == kept_bytes(lambda: attend() @ output.mT) - gated_bytes


def kept_bytes(run: Callable[[], object]) -> int:
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    return sum(kept.values())


def test_neither_rotated_maps_nor_scores_are_kept() -> None:
    projected, gamma, beta, bias = make_inputs(1, 512, chunk=64, d_qk=32, d_value=32, dtype=torch.float32)

    def run(backend: Any) -> Tensor:
        return gated_mixed_chunk_attention(
            projected, gamma, beta, bias=bias, chunk_size=64, positions=torch.arange(512), causal=True, backend=backend
        )

    projected_, attended, states, small = 512 * 96, 512 * 32, 8 * 32 * 32, 4 * 64 * 64
    rotations = 2 * 512 * 16  # the batch's, which all layers share
    assert kept_bytes(lambda: run("tiled")) < 4 * (projected_ + attended + states + rotations + small)
    assert kept_bytes(lambda: run("torch")) > 2 * kept_bytes(lambda: run("tiled"))


def test_pytorch_can_check_compile_and_export_it() -> None:
    projected, gamma, beta, bias = make_inputs(2, 12, dtype=torch.float32)
    chunks = projected.detach().unflatten(1, (3, CHUNK)).requires_grad_()
    scale = torch.full((1, 1, 1, 1), 0.3)
    rotations = torch.randn(2, 1, 3, CHUNK, D_QK // 2)
    document, n_documents = torch.tensor([0, 1, 1]), 2
    output, projection_bias = torch.randn(7, D_VALUE, requires_grad=True), torch.randn(chunks.shape[-1], requires_grad=True)
    ones = torch.ones(1, 3)
    arguments = (chunks, None, gamma, beta, bias, rotations, scale, ones, document, None, None, n_documents, 0.5, True)
    torch.library.opcheck(cpu._fused.operator, (*arguments, True))
    linear = torch.randn(2, *chunks.shape[:3], D_QK, requires_grad=True)
    mapped = (chunks, projection_bias, *arguments[2:9], output, linear, *arguments[11:], True)
    torch.library.opcheck(cpu._fused.operator, mapped)
    without = (chunks.detach(), None, gamma.detach(), beta.detach(), None, None, *arguments[6:], False)
    torch.library.opcheck(cpu._fused.operator, without)
    kept = (torch.randn(2, 3, CHUNK, D_VALUE), torch.randn(2, 3, CHUNK, D_VALUE), torch.randn(2, 3, D_QK, D_VALUE))
    strided = chunks.detach().transpose(0, 1).contiguous().transpose(0, 1)
    fixed = (strided, None, gamma.detach(), beta.detach(), bias.detach(), *arguments[5:])
    torch.library.opcheck(cpu._fused.backward, (*kept, *fixed, [True, False, True, True, True, False, False]))
    both = (strided, projection_bias.detach(), *fixed[2:9], output.detach(), linear.detach(), *fixed[11:])
    torch.library.opcheck(cpu._fused.backward, (torch.randn(2, 3, CHUNK, 7), *kept[1:], *both, [True] * 7))

    def run(*inputs: Tensor) -> Tensor:
        return gated_mixed_chunk_attention(
            *inputs[:3], bias=inputs[3], chunk_size=CHUNK, positions=torch.arange(12), causal=True, backend="tiled"
        )

    inputs = (projected, gamma, beta, bias)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    pairs = [(out, *torch.autograd.grad(out.square().sum(), inputs)) for out in (run(*inputs), compiled(*inputs))]
    assert_same(list(pairs[0]), list(pairs[1]), 1e-6)


def test_second_derivative_is_refused_with_what_to_do() -> None:
    projected, gamma, beta, _ = make_inputs(1, 8)
    out = gated_mixed_chunk_attention(projected, gamma, beta, chunk_size=CHUNK, positions=None)
    with pytest.raises(
        RuntimeError, match=r"backend 'tiled' can be differentiated only once: .* set_backend\(model, 'torch'\)"
    ):
        torch.autograd.grad(out.sum(), gamma, create_graph=True)


@pytest.mark.parametrize("enabled", [False, True])
def test_tiles_compute_in_the_dtype_of_autocast(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype is chosen before autocast is turned off: otherwise, a bf16 layer would compute in fp32."""
    seen, fused = [], cpu._fused
    monkeypatch.setattr(cpu, "_fused", lambda inputs: (seen.append(inputs.projected.dtype), fused(inputs))[1])
    layer = FLASH(16, d_qk=8, chunk_size=CHUNK)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        layer(torch.randn(1, 9, 16)).sum().backward()
    assert seen == [torch.bfloat16 if enabled else torch.float32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.ones(2, 8, dtype=torch.bool)}, r"mask has shape \[2, 8\]"),
        ({"beta": torch.ones(4, 1)}, r"beta has shape \[4, 1\], but must be that of gamma"),
        ({"gamma": torch.ones(3, D_QK)}, r"gamma has shape \[3, 6\], but must be \[4, s\]"),
        ({"projected": torch.ones(1, 8, D_QK)}, r"projected has shape \[1, 8, 6\], but must be \[B, T, 2 e \+ s\] with s = 6"),
        ({"positions": torch.arange(CHUNK)}, r"positions has shape \[4\], but must be \[T\] = \[8\] or \[B, T\] = \[1, 8\]"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    projected, gamma, beta, _ = make_inputs(1, 8)
    arguments = {"projected": projected, "gamma": gamma, "beta": beta, "positions": None} | options
    with pytest.raises(ValueError, match=message):
        gated_mixed_chunk_attention(**arguments, chunk_size=CHUNK)
