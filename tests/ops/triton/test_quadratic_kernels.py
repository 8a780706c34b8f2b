"""The kernels of quadratic attention against its definition, which is a line of PyTorch in float64.

The same line in the dtype under test is the measure of how much error is allowed there.
"""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.foreign.mixers import laplace
from lineartime.ops.positions import by_distance
from lineartime.ops.quadratic import Inputs
from lineartime.ops.triton import quadratic

pytest.importorskip("triton")
kernels = pytest.importorskip("lineartime.ops.triton.kernels")
# Triton 3.9 announces another default for 3.10 whenever it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

Attention = Callable[..., Tensor]
WIDTH, COLUMNS = 16, 16
ODD = {"width": 24, "columns": 40}  # not powers of two, and more columns than the interpreter has in a block
SCALE = 0.25  # the same in float32 and in float64


def attend(*tensors: Tensor, bias: Tensor | None = None, **constants: Any) -> Tensor:
    return quadratic.kernels(Inputs(*tensors, bias=bias, **constants))


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    row_scale: Tensor,
    score_scale: float,
    causal: bool,
    activation: str,
) -> Tensor:
    """In float64 the definition, in another dtype what plain PyTorch makes of it."""
    compute = torch.float32 if v.dtype == torch.float16 else v.dtype
    scores = (q.to(compute) @ k.to(compute).mT).to(torch.promote_types(compute, torch.float32)) * score_scale
    if bias is not None:
        scores = scores + by_distance(bias, q.shape[1])
    weights = (scores.relu().square() if activation == "relu2" else laplace(scores)) * row_scale[..., None]
    return ((weights.tril() if causal else weights).to(compute) @ v.to(compute)).to(v.dtype)


def make_inputs(
    length: int,
    dtype: torch.dtype,
    device: str,
    *,
    batch: int = 2,
    with_bias: bool = True,
    width: int = WIDTH,
    columns: int = COLUMNS,
) -> tuple[list[Tensor], dict[str, Any]]:
    """[q, k, v, bias], and the options that are constants."""
    shapes = [(batch, length, width), (batch, length, width), (batch, length, columns), (max(0, 2 * length - 1),)]
    inputs = [torch.randn(shape).to(device, dtype) for shape in shapes[: 4 if with_bias else 3]]
    return inputs, {"row_scale": torch.rand(batch, length).to(device), "score_scale": SCALE}


def run(attention: Attention, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """The output, and the gradients of all inputs for a fixed output gradient."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    q, k, v, *bias = inputs
    out = attention(q, k, v, bias=bias[0] if bias else None, **options)
    direction = (torch.arange(out.numel()) * 7 % 17 - 8).view(out.shape).to(out) / 8  # the same in every dtype
    return [out, *torch.autograd.grad(out, inputs, direction, materialize_grads=True)]


def assert_close(fast: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for x, y in zip(fast, exact, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * (1 + y.abs().max())


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 queries or keys at a time."""
    monkeypatch.setattr(quadratic, "TOKENS", 16)
    monkeypatch.setattr(quadratic, "SCORES", 0)


@every_pair(
    length=[1, 16, 37, 65],
    causal=[False, True],
    kind=[("relu2", True), ("relu2", False), ("laplace", True)],
    in_parts=[False, True],
)
def test_values_and_gradients_are_the_definition(
    length: int, causal: bool, kind: tuple[str, bool], in_parts: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    activation, with_bias = kind
    dtype, tolerance = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 1e-5)
    inputs, options = make_inputs(length, dtype, device, with_bias=with_bias, batch=1 + in_parts, **ODD)
    options |= {"causal": causal, "activation": activation}
    if in_parts:
        shorten(monkeypatch)
    exact = run(definition, [x.double() for x in inputs], **options)
    assert_close(run(attend, inputs, **options), exact, tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes in the interpreter, whose own blocks are small enough")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_thousand_tokens_and_wide_heads_are_the_definition(causal: bool, dtype: torch.dtype, device: str) -> None:
    inputs, options = make_inputs(1000, dtype, device, batch=1, width=160, columns=300)
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
    inputs, options = make_inputs(33, dtype, device, **ODD)
    options |= {"causal": causal, "activation": activation}
    exact = run(definition, [x.double() for x in inputs], **options)
    plain, fast = run(definition, inputs, **options), run(attend, inputs, **options)
    for x, y, z in zip(fast, plain, exact, strict=True):
        assert x.dtype == dtype
        tiny = torch.finfo(torch.float32).eps * z.abs().max()
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 8 * tiny


def test_bias_may_be_more_exact_than_the_rest(device: str) -> None:
    (*inputs, bias), options = make_inputs(33, torch.bfloat16, device, batch=16)
    options |= {"causal": True, "activation": "relu2"}
    *_, d_bias = run(attend, [*inputs, bias.float()], **options)
    assert d_bias.dtype == torch.float32
    *_, plain = run(definition, [*inputs, bias.float()], **options)
    *_, exact = run(definition, [x.double() for x in (*inputs, bias)], **options)
    assert (d_bias - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_large_float16_scores_do_not_overflow(device: str) -> None:
    inputs, options = make_inputs(17, torch.float16, device)
    inputs[0], inputs[1] = 40 * inputs[0], 40 * inputs[1]  # scores of some 2000, squares of some 4 million
    options |= {"causal": True, "activation": "relu2"}
    options["row_scale"] = options["row_scale"] * 1e-5
    outputs = run(attend, inputs, **options)
    assert all(x.isfinite().all() for x in outputs)
    assert_close(outputs[:1], run(definition, [x.double() for x in inputs], **options)[:1], 2e-3)


def test_same_inputs_give_the_same_bits(device: str) -> None:
    inputs, options = make_inputs(65, torch.bfloat16, device, batch=1)
    options |= {"causal": True, "activation": "relu2"}
    first, second = (run(attend, inputs, **options) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_inputs_and_output_gradients_may_be_strided(device: str) -> None:
    inputs, options = make_inputs(33, torch.float32, device)
    options |= {"causal": False, "activation": "relu2"}
    strided = [torch.stack([x, x], -1)[..., 0] for x in inputs]
    assert not any(x.is_contiguous() for x in strided)
    torch.testing.assert_close(run(attend, strided, **options), run(attend, inputs, **options), rtol=0, atol=0)

    leaves = [x.requires_grad_() for x in inputs]
    out = attend(*leaves[:3], bias=leaves[3], **options)
    expanded = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    torch.testing.assert_close(expanded, torch.autograd.grad(out, leaves, torch.ones_like(out)), rtol=0, atol=0)


@pytest.mark.parametrize(("batch", "length", "columns"), [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_nothing_to_attend_to_gives_empty_outputs_and_zero_gradients(
    batch: int, length: int, columns: int, device: str
) -> None:
    inputs, options = make_inputs(length, torch.float32, device, batch=batch, columns=columns)
    out, *gradients = run(attend, inputs, causal=True, activation="relu2", **options)
    assert out.shape == (batch, length, columns)
    assert [x.shape for x in gradients] == [x.shape for x in inputs]
    assert not any(x.any() for x in gradients)


def test_bias_that_is_a_constant_gets_no_gradient_and_no_memory(allocations: list[tuple[int, ...]], device: str) -> None:
    (q, k, v, bias), options = make_inputs(33, torch.float32, device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attend(*inputs, bias=bias, causal=True, activation="relu2", **options).sum().backward()
    assert bias.grad is None
    assert all(x.grad is not None for x in inputs)
    assert (65,) not in allocations
    attend(*inputs, bias=bias.requires_grad_(), causal=True, activation="relu2", **options).sum().backward()
    assert (65,) in allocations


def test_memory_is_linear_in_the_length(
    allocations: list[tuple[int, ...]], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    inputs, options = make_inputs(65, torch.float32, device, with_bias=False)
    run(attend, inputs, causal=False, activation="relu2", **options)
    of_tokens = [(2, 65, COLUMNS)] * 2 + [(2, 65, WIDTH)] * 2  # out, dv; dq, dk
    of_parts = [(2, 16, 65)] * 4 + [(2, 1, 65)] + ([(2, 65, 16)] * 4 + [(2, 65, 1)]) * 2  # P; P and dX
    assert sorted(allocations) == sorted(of_tokens + of_parts)


def test_op_keeps_the_promises_of_a_custom_op(device: str) -> None:
    inputs, options = make_inputs(17, torch.float32, device)
    arguments = (*(x.requires_grad_() for x in inputs), options["row_scale"], SCALE, True, "relu2", True)
    torch.library.opcheck(torch.ops.lineartime.triton_quadratic.default, arguments)


def test_compiled_graph_holds_it_whole(device: str) -> None:
    inputs, options = make_inputs(17, torch.float32, device)
    options |= {"causal": True, "activation": "relu2"}
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, inputs, **options), run(attend, inputs, **options), rtol=0, atol=0)


@pytest.mark.parametrize(("precision", "expected"), [("none", "tf32x3"), ("ieee", "tf32x3"), ("tf32", "tf32")])
def test_float32_is_multiplied_as_exactly_as_torch_is_told_to(precision: str, expected: str) -> None:
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, precision
    try:
        formats = [kernels.number_formats(dtype)["PRECISION"] for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    finally:
        products.fp32_precision = before
    assert formats == [expected, expected, "ieee"]


def test_products_of_exact_float32_keep_22_bits_of_each_factor() -> None:
    """As in the interpreter that the kernels are tested in."""
    interpreter = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "interpreter.py")))
    numbers = torch.randn(4096).numpy()
    first, rest = interpreter._split(interpreter.interpreter.TensorHandle(numbers, interpreter.tl.float32))
    for part in (first, rest):
        assert not (part.data.view(np.uint32) & 0x1FFF).any(), "tensor cores read no more than the first 10 bits of a fraction"
    left = numbers.astype(np.float64) - first.data - rest.data
    assert (np.abs(left) <= 2.0**-22 * np.abs(numbers)).all()
