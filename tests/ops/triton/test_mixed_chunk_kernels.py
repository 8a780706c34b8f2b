"""The kernels of mixed chunk attention against its definition, which is a few lines of PyTorch in float64.

The same lines in the dtype under test are the measure of how much error is allowed there.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.foreign.activations import laplace
from lineartime.ops.mixed_chunk import triton

pytest.importorskip("triton")
# Triton 3.9 announces another default for 3.10 whenever it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

Attention = Callable[..., Tensor]
WIDTH, COLUMNS = 16, 16
ODD = {"width": 24, "columns": 40}  # not powers of two, and more columns than the interpreter has in a block
SCALE = 0.25  # the same in float32 and in float64


def attend(*tensors: Tensor, bias: Tensor | None = None, **constants: Any) -> Tensor:
    return triton.of_heads(triton.OfHeads(*tensors, bias=bias, **constants))


def definition(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    row_scale: Tensor,
    state_scale: Tensor,
    document_starts: Tensor,
    score_scale: float,
    causal: bool,
    activation: str,
) -> Tensor:
    """In float64 the definition, in another dtype what plain PyTorch makes of it: `lineartime.ops.mixed_chunk`, in short."""
    compute = torch.float32 if v.dtype == torch.float16 else v.dtype
    exact = torch.promote_types(compute, torch.float32)
    q_quad, k_quad, q_lin, k_lin, values = (x.to(compute) for x in (q_quad, k_quad, q_lin, k_lin, v))

    scores = (q_quad @ k_quad.mT).to(exact) * score_scale
    if bias is not None:
        scores = scores + bias
    weights = (scores.relu().square() if activation == "relu2" else laplace(scores)) * row_scale[..., None]
    out = (weights.tril() if causal else weights).to(compute) @ values

    summaries = (k_lin.mT @ values).to(exact)
    states = []
    for first, last in pairwise(document_starts.tolist()):
        for chunk in range(first, last):
            states.append(summaries[:, first : chunk if causal else last].sum(1) * state_scale[:, chunk, None, None])
    return (out + q_lin @ torch.stack(states, 1).to(compute)).to(v.dtype)


def make_inputs(
    chunk_size: int, starts: list[int], dtype: torch.dtype, device: str, *, batch: int = 1, with_bias: bool = True,
    width: int = WIDTH, columns: int = COLUMNS, shared_scales: bool = False,
) -> tuple[list[Tensor], dict[str, Any]]:  # fmt: skip
    """[q_quad, k_quad, q_lin, k_lin, v, bias], and the options that are constants."""
    chunks = (batch, starts[-1], chunk_size)
    shapes = [(*chunks, width)] * 4 + [(*chunks, columns)] + [(chunk_size, chunk_size)] * with_bias
    inputs = [torch.randn(shape).to(device, dtype) for shape in shapes]
    rows = 1 if shared_scales else batch
    scales = {"row_scale": torch.rand(rows, *chunks[1:]), "state_scale": torch.rand(rows, starts[-1]) / chunk_size}
    scales["document_starts"] = torch.tensor(starts, dtype=torch.int32)
    return inputs, {name: x.to(device) for name, x in scales.items()} | {"score_scale": SCALE}


def run(attention: Attention, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The output, and the gradients of all inputs for a fixed output gradient."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(*inputs[:5], bias=inputs[5] if len(inputs) == 6 else None, **options)
    direction = (torch.arange(out.numel()) * 7 % 17 - 8).view(out.shape).to(out) / 8  # the same in every dtype
    return [out, *torch.autograd.grad(out, inputs, direction, materialize_grads=True)]


def assert_close(fast: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for x, y in zip(fast, exact, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * (1 + y.abs().max())


def assert_is_the_definition(inputs: list[Tensor], options: dict[str, Any], device: str) -> None:
    exact = run(definition, [x.double() for x in inputs], **options)
    if device == "cpu":
        assert_close(run(attend, [x.double() for x in inputs], **options), exact, 1e-12)
    else:
        assert_close(run(attend, inputs, **options), exact, 1e-5)


@every_pair(chunk_size=[1, 33], causal=[False, True], kind=[("relu2", True), ("relu2", False), ("laplace", True)])
def test_values_and_gradients_are_the_definition(chunk_size: int, causal: bool, kind: tuple[str, bool], device: str) -> None:
    activation, with_bias = kind
    inputs, options = make_inputs(chunk_size, [0, 2], torch.float32, device, with_bias=with_bias, **ODD)
    assert_is_the_definition(inputs, options | {"causal": causal, "activation": activation}, device)


def test_heads_wider_than_a_block_are_the_definition(device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float32, device, width=72)
    assert_is_the_definition(inputs, options | {"causal": True, "activation": "relu2"}, device)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_read_nothing_of_each_other(causal: bool, device: str) -> None:
    inputs, options = make_inputs(16, [0, 0, 1, 1, 4, 4], torch.float32, device)
    assert_is_the_definition(inputs, options | {"causal": causal, "activation": "relu2"}, device)


def test_a_huge_value_takes_no_digits_from_the_chunks_that_do_not_read_it(device: str) -> None:
    inputs, options = make_inputs(16, [0, 5, 8], torch.float32, device)
    options |= {"causal": True, "activation": "relu2"}
    before = attend(*inputs[:5], bias=inputs[5], **options)
    inputs[4][0, 3, 0] = 1e30  # a token of the fourth of five chunks
    after = attend(*inputs[:5], bias=inputs[5], **options)
    assert torch.equal(after[0, :3], before[0, :3])
    assert torch.equal(after[0, 5:], before[0, 5:]), "another document"
    assert (after[0, 4] - before[0, 4]).abs().max() > 1e20


@pytest.mark.parametrize("shared_scales", [False, True])
def test_rows_of_a_batch_have_their_own_scales_or_share_them(shared_scales: bool, device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float32, device, batch=2, shared_scales=shared_scales)
    assert_is_the_definition(inputs, options | {"causal": True, "activation": "relu2"}, device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes in the interpreter, whose own blocks are small enough")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_chunks_and_wide_heads_are_the_definition(causal: bool, dtype: torch.dtype, device: str) -> None:
    inputs, options = make_inputs(256, [0, 2], dtype, device, width=160, columns=300)
    options |= {"causal": causal, "activation": "relu2", "score_scale": 0.0625}
    exact = run(definition, [x.double() for x in inputs], **options)
    assert_close(run(attend, inputs, **options), exact, 2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("dtype", "causal", "activation"),
    [(torch.float32, False, "laplace"), (torch.bfloat16, True, "relu2"), (torch.float16, True, "laplace")],
)
def test_errors_are_at_most_twice_those_of_plain_pytorch(
    dtype: torch.dtype, causal: bool, activation: str, device: str
) -> None:
    inputs, options = make_inputs(33, [0, 1, 3], dtype, device, **ODD)
    options |= {"causal": causal, "activation": activation}
    exact = run(definition, [x.double() for x in inputs], **options)
    plain, fast = run(definition, inputs, **options), run(attend, inputs, **options)
    for x, y, z in zip(fast, plain, exact, strict=True):
        assert x.dtype == dtype
        tiny = torch.finfo(torch.float32).eps * z.abs().max()
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 8 * tiny


def test_states_are_summed_in_float32(device: str) -> None:
    # In bfloat16, 256 + 1 + 1 + ... stays 256.
    ones = torch.ones(1, 9, 1, 16, dtype=torch.bfloat16, device=device)
    many = ones.clone()
    many[:, 0] = 16
    scales = {"row_scale": ones[..., 0].float(), "state_scale": ones[:, :, 0, 0].float() / 16}
    scales["document_starts"] = torch.tensor([0, 9], dtype=torch.int32, device=device)
    options = {"score_scale": 1.0, "causal": False, "activation": "relu2"}
    assert (attend(0 * ones, ones, ones, many, many, **scales, **options) == 264).all()


def test_large_float16_scores_do_not_overflow(device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float16, device)
    inputs[0], inputs[1] = 40 * inputs[0], 40 * inputs[1]  # scores of some 2000, squares of some 4 million
    options |= {"causal": True, "activation": "relu2", "row_scale": options["row_scale"] * 1e-5}
    outputs = run(attend, inputs, **options)
    assert all(x.isfinite().all() for x in outputs)
    assert_close(outputs[:1], run(definition, [x.double() for x in inputs], **options)[:1], 2e-3)


def test_the_same_inputs_give_the_same_bits(device: str) -> None:
    inputs, options = make_inputs(33, [0, 2], torch.bfloat16, device)
    options |= {"causal": True, "activation": "relu2"}
    first, second = (run(attend, inputs, **options) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_inputs_and_output_gradients_may_be_strided(device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float32, device)
    options |= {"causal": False, "activation": "relu2"}
    strided = [x.mT.contiguous().mT for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    for x, y in zip(run(attend, strided, **options), run(attend, inputs, **options), strict=True):
        assert torch.equal(x, y)

    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves[:5], bias=leaves[5], **options)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for x, y in zip(expanded, torch.autograd.grad(out, leaves, torch.ones_like(out)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("batch", "starts", "columns"), [(0, [0, 2], 4), (1, [0], 4), (1, [0, 0, 0], 4), (1, [0, 2], 0)])
def test_nothing_to_attend_to_gives_empty_outputs_and_zero_gradients(
    batch: int, starts: list[int], columns: int, device: str
) -> None:
    inputs, options = make_inputs(8, starts, torch.float32, device, batch=batch, columns=columns)
    out, *gradients = run(attend, inputs, causal=True, activation="relu2", **options)
    assert out.shape == (batch, starts[-1], 8, columns)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    assert not any(x.any() for x in gradients)


def test_memory_is_linear_in_the_length(allocations: list[tuple[int, ...]], device: str) -> None:
    inputs, options = make_inputs(16, [0, 5], torch.float32, device)
    run(attend, inputs, causal=True, activation="relu2", **options)
    states, scores = (1, 5, WIDTH, COLUMNS), (5, 16, 16)
    assert sorted(allocations) == sorted([states] * 2 + [scores] * 3)


def test_the_op_keeps_the_promises_of_a_custom_op(device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float32, device)
    scales = (options["row_scale"], options["state_scale"], options["document_starts"], SCALE)
    arguments = (*(x.requires_grad_() for x in inputs), *scales, True, "relu2", True)
    torch.library.opcheck(torch.ops.lineartime.triton_mixed_chunk.default, arguments)


def test_a_compiled_graph_holds_it_whole(device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float32, device)
    options |= {"causal": True, "activation": "relu2"}
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for x, y in zip(run(compiled, inputs, **options), run(attend, inputs, **options), strict=True):
        assert torch.equal(x, y)


def test_autocast_changes_nothing(device: str) -> None:
    inputs, options = make_inputs(16, [0, 2], torch.float32, device)
    options |= {"causal": True, "activation": "relu2"}
    plain = run(attend, inputs, **options)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = run(attend, inputs, **options)
    assert all(torch.equal(x, y) for x, y in zip(cast, plain, strict=True))
