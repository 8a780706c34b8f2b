"""The kernels from projected tokens to the gated output of a FLASH layer, against plain PyTorch in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import lineartime.foreign.activations  # noqa: F401  # laplace
from lineartime.foreign.positions import in_part
from lineartime.ops import gated_mixed_chunk_attention
from lineartime.ops.mixed_chunk import triton
from lineartime.ops.positions import rotary_table

pytest.importorskip("triton")
# Triton 3.9 announces another default for 3.10 whenever it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

CHUNK, D_QK, D_VALUE = 16, 24, 40  # widths that are not powers of two, and more values than the interpreter has in a block
LENGTH = 37
AT = torch.arange(LENGTH)


def make_inputs(batch: int = 2, length: int = LENGTH, d_qk: int = D_QK, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """[projected, gamma, beta, bias], the same numbers for every dtype."""
    shapes = [(batch, length, 2 * D_VALUE + d_qk), (4, d_qk), (4, d_qk), (CHUNK, CHUNK)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def run(inputs: list[Tensor], backend: Any, device: str, **options: Any) -> list[Tensor]:
    """The output, and the gradients of all inputs for a fixed output gradient."""
    projected, gamma, beta, bias = own = [x.detach().to(device).requires_grad_() for x in inputs]
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    out = gated_mixed_chunk_attention(projected, gamma, beta, bias=bias, chunk_size=CHUNK, backend=backend, **options)
    direction = (torch.arange(out.numel()) * 7 % 17 - 8).view(out.shape).to(out) / 8
    return [out, *torch.autograd.grad(out, own, direction)]


def assert_is_the_definition(inputs: list[Tensor], device: str, **options: Any) -> None:
    """To rounding in float64, which the interpreter has; on a GPU in float32."""
    dtype, tolerance = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 2e-5)
    exact = run(inputs, "torch", device, **options)
    for x, y in zip(run([x.to(dtype) for x in inputs], "triton", device, **options), exact, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * (1 + y.abs().max())


PACK = torch.tensor([0, 5, 5, 30, LENGTH])
# Each layout, activation and normalisation in one direction at least.
CASES: dict[str, dict[str, Any]] = {
    "ragged": {"causal": True, "positions": AT},
    "ragged, both ways": {"causal": False, "positions": AT, "normalization": "paper"},
    "rows at positions of their own": {"causal": True, "positions": AT + torch.tensor([[0], [100]]), "activation": "laplace"},
    "padding": {"causal": True, "positions": AT, "mask": AT.expand(2, -1) >= torch.tensor([[0], [11]])},
    "rotated in part": {"causal": False, "positions": in_part(rotary_table(AT, 4, torch.float64), D_QK)},
    "without rotation": {"causal": True, "positions": None, "normalization": "paper_sum"},
    "a pack": {"causal": True, "positions": AT, "cu_seqlens": PACK},
    "a pack, both ways": {"causal": False, "positions": AT, "cu_seqlens": PACK},
    "a prefix": {"causal": True, "positions": AT, "prefix_lengths": torch.tensor([0, 21])},
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_definition(name: str, device: str) -> None:
    assert_is_the_definition(make_inputs(batch=1 if "pack" in name else 2), device, **CASES[name])


def test_odd_and_wide_heads_and_a_single_token_are_the_definition(device: str) -> None:
    assert_is_the_definition(make_inputs(d_qk=5), device, causal=True, positions=None)
    assert_is_the_definition(
        make_inputs(batch=1, length=20, d_qk=140), device, positions=torch.arange(20)
    )  # two blocks of pairs
    assert_is_the_definition(make_inputs(batch=1, length=1), device, causal=True, positions=torch.arange(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_at_most_twice_those_of_plain_pytorch(dtype: torch.dtype, device: str) -> None:
    inputs = [x.to(dtype) for x in make_inputs()]
    options: dict[str, Any] = {"causal": True, "positions": AT}
    exact = run([x.double() for x in inputs], "torch", device, **options)
    plain, fast = (run(inputs, backend, device, **options) for backend in ("torch", "triton"))
    for x, y, z in zip(fast, plain, exact, strict=True):
        assert x.dtype == dtype
        tiny = torch.finfo(torch.float32).eps * z.abs().max()
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 8 * tiny


def test_the_same_inputs_give_the_same_bits(device: str) -> None:
    inputs = [x.to(torch.bfloat16) for x in make_inputs()]
    first, second = (run(inputs, "triton", device, causal=True, positions=AT) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def kept_bytes(inputs: list[Tensor], device: str) -> int:
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    projected, gamma, beta, bias = (x.to(device).requires_grad_() for x in inputs)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_mixed_chunk_attention(
            projected, gamma, beta, bias=bias, chunk_size=CHUNK, positions=torch.arange(64), causal=True, backend="triton"
        )
    return sum(kept.values())


def test_neither_values_nor_queries_and_keys_are_kept(device: str) -> None:
    inputs = make_inputs(batch=1, length=64, dtype=torch.float32)
    tokens, attended, states = 64 * (2 * D_VALUE + D_QK), 64 * D_VALUE, 4 * D_QK * D_VALUE
    rotations, small = 2 * 64 * D_QK // 2, 4 * (64 + CHUNK * CHUNK + 8 * D_QK)
    assert kept_bytes(inputs, device) <= 4 * (tokens + attended + states + rotations + small)


@pytest.mark.nightly
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_operator_keeps_the_promises_of_a_custom_op(with_bias: bool, device: str) -> None:
    projected, gamma, beta, bias = (x.to(device, torch.float32).requires_grad_() for x in make_inputs(length=32))
    tokens = projected.detach().unflatten(1, (2, CHUNK)).requires_grad_()
    rotations, real = torch.randn(2, 1, 2, CHUNK, D_QK // 2, device=device), torch.rand(2, 2, CHUNK, device=device) > 0.2
    scales = (torch.rand(1, 2, CHUNK, device=device), torch.rand(1, 2, device=device))
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    rest = (rotations, real, *scales, starts, 0.25, True, "relu2")
    if not with_bias:
        without_gradients = tuple(x.detach() for x in (tokens, gamma, beta))
        torch.library.opcheck(triton.of_tokens.operator, (*without_gradients, None, *rest, False))
        return
    torch.library.opcheck(triton.of_tokens.operator, (tokens, gamma, beta, bias, *rest, True))
    kept = (torch.randn(2, 2, CHUNK, D_VALUE, device=device), torch.randn(2, 2, D_QK, D_VALUE, device=device))
    fixed = tuple(None if x is None else x.detach() for x in (tokens, gamma, beta, bias))
    d_out = torch.randn(2, 2, CHUNK, D_VALUE, device=device)
    torch.library.opcheck(triton.of_tokens.backward, (d_out, *kept, *fixed, *rest, [True] * 4))


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_compiled_pack_writes_the_states_of_chunks_that_no_document_fills(causal: bool, device: str) -> None:
    inputs = [x.to(device, torch.float32) for x in make_inputs(batch=1)]
    options: dict[str, Any] = {"chunk_size": CHUNK, "causal": causal, "positions": AT.to(device)}
    ends = torch.tensor([0, 16, 32, LENGTH], device=device)  # three chunks, where compiled code expects up to five

    def attend(backend: Any, *own: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        own = tuple(x.to(dtype).requires_grad_() for x in own)
        projected, gamma, beta, bias = own

        def call(projected: Tensor, gamma: Tensor, beta: Tensor, bias: Tensor) -> Tensor:
            return gated_mixed_chunk_attention(projected, gamma, beta, bias=bias, cu_seqlens=ends, backend=backend, **options)

        run = torch.compile(call, fullgraph=True, backend="aot_eager") if backend == "triton" else call
        out = run(projected, gamma, beta, bias)
        return [out, *torch.autograd.grad(out.sum(), own)]

    torch._dynamo.reset()
    for fast, exact in zip(attend("triton", *inputs), attend("torch", *inputs, dtype=torch.float64), strict=True):
        torch.testing.assert_close(fast.double(), exact, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("batch", "length"), [(0, 32), (1, 0)])
def test_nothing_to_attend_to_gives_empty_outputs_and_zero_gradients(batch: int, length: int, device: str) -> None:
    out, d_projected, *gradients = run(make_inputs(batch, length), "triton", device, positions=None, causal=True)
    assert (out.shape, d_projected.shape) == ((batch, length, D_VALUE), (batch, length, 2 * D_VALUE + D_QK))
    assert not any(x.any() for x in gradients)


def test_it_counts_the_products_it_computes() -> None:
    tokens, table = torch.zeros(3, 5, CHUNK, 2 * D_VALUE + D_QK, device="meta"), torch.zeros(4, D_QK, device="meta")
    scales = (torch.zeros(1, 1, 1, device="meta"), torch.zeros(1, 5, device="meta"), torch.zeros(2, device="meta"))
    inside, across = 2 * 15 * CHUNK**2, 2 * 15 * CHUNK * D_QK * D_VALUE
    rest = (tokens, table, table, None, None, None, *scales, 1.0, True, "relu2")
    with FlopCounterMode(display=False) as counter:
        out, attended, states = torch.ops.lineartime.triton_gated_mixed_chunk(*rest, True)
    assert counter.get_total_flops() == inside * (D_QK + D_VALUE) + 2 * across
    with FlopCounterMode(display=False) as counter:
        torch.ops.lineartime.triton_gated_mixed_chunk_backward(out, attended, states, *rest, [True] * 3 + [False])
    assert counter.get_total_flops() == inside * (3 * D_QK + 2 * D_VALUE) + 4 * across
