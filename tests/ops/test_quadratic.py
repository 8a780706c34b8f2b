"""GAU's attention: the parallel and the streaming form against the definition."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import every_pair
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops import FactoredBias, KVCache, quadratic_attention, quadratic_attention_extend, quadratic_attention_oracle
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.quadratic import attend_rows, cpu
from lineartime.ops.quadratic.inputs import QuadraticOptions

LENGTHS = [1, 4, 17]
OPTIONS = st.sampled_from([(activation, normalization) for activation in ACTIVATIONS for normalization in ("count", 7)])


def empty_cache(k: Tensor, v: Tensor) -> KVCache:
    return KVCache(torch.zeros(len(k), dtype=torch.long), k[:, :0], v[:, :0])


def make_inputs(batch: int, length: int, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, length, width, dtype=torch.float64).requires_grad_(grad) for width in (6, 6, 5))
    return q, k, v


@every_pair(
    length=LENGTHS,
    causal=[False, True],
    activation=ACTIVATIONS,
    normalization=["count", "paper", 7],
    padded=[False, True],
    backend=["auto", "torch"],
)
def test_parallel_form_is_the_definition(
    length: int,
    causal: bool,
    activation: Any,
    normalization: Any,
    padded: bool,
    backend: Any,
    assert_same_function: Callable[..., None],
) -> None:
    mask = torch.rand(3, length) > 0.4 if padded else None
    if mask is not None:
        mask[0] = False  # a row without any real token
    options = {"causal": causal, "mask": mask, "activation": activation, "normalization": normalization}
    assert_same_function(
        lambda q, k, v, bias: quadratic_attention(q, k, v, bias=bias, backend=backend, **options),
        lambda q, k, v, bias: quadratic_attention_oracle(q, k, v, bias=bias, **options),
        *(*make_inputs(3, length), torch.randn(length, length)),
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("backend", ["tiled", "torch"])
def test_blocks_of_queries_do_not_show(padded: bool, backend: Any) -> None:
    length = 600  # three causal blocks, the last one short
    q, k, v = make_inputs(1, length, grad=True)
    bias = torch.randn(length, length, dtype=torch.float64)
    mask = torch.rand(1, length) > 0.2
    causal = quadratic_attention(q, k, v, causal=True, bias=bias, mask=mask if padded else None, backend=backend)
    visible = torch.ones(length, length, dtype=torch.bool).tril() & (mask[0] | (not padded))
    weights = ((q[0] @ k[0].T / 6**0.5 + bias).relu() ** 2).masked_fill(~visible, 0) / visible.sum(1, keepdim=True).clamp(min=1)
    expected = (weights @ v[0]).masked_fill(~(mask[0] | (not padded))[:, None], 0)
    torch.testing.assert_close(causal[0], expected, atol=1e-10, rtol=0)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (causal, expected)]
    for fast, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, exact, atol=1e-9, rtol=0)


@every_pair(
    ends=[[0], [0, 5, 9, 17], [0, 1, 1, 2, 17]],
    causal=[False, True],
    normalization=["count", "paper"],
    backend=["auto", "torch"],
)
def test_packed_documents_equal_each_document_alone(ends: list[int], causal: bool, normalization: Any, backend: Any) -> None:
    length = ends[-1]
    inputs, bias = make_inputs(1, length), torch.randn(length, length, dtype=torch.float64)
    factors = FactoredBias(*torch.randn(2, length, 3, dtype=torch.float64).unbind(0))
    mask = torch.rand(1, length) > 0.3
    options: dict[str, Any] = {"causal": causal, "normalization": normalization, "backend": backend}
    for padding in (None, mask):
        for whole in (None, bias, factors):
            packed = quadratic_attention(*inputs, bias=whole, mask=padding, cu_seqlens=torch.tensor(ends), **options)
            assert packed.shape == (1, length, 5)
            for start, stop in pairwise(ends):
                size = stop - start
                part = FactoredBias(*(x[:size] for x in whole)) if isinstance(whole, FactoredBias) else whole
                part = part[:size, :size] if isinstance(part, torch.Tensor) else part
                own = None if padding is None else padding[:, start:stop]
                alone = quadratic_attention(*(x[:, start:stop] for x in inputs), bias=part, mask=own, **options)
                torch.testing.assert_close(packed[:, start:stop], alone, atol=1e-12, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 7) | st.just(1), st.booleans()), min_size=1, max_size=6),
    options=OPTIONS,
    gradients=st.booleans(),
)
def test_streams_in_any_pieces_with_and_without_padding_are_the_definition(
    pieces: list[tuple[int, bool]], options: tuple[Any, Any], gradients: bool
) -> None:
    """After the first piece with padding, the streams are at different positions."""
    own: dict[str, Any] = {"activation": options[0], "normalization": options[1]}
    mask = torch.cat([torch.rand(3, size) > 0.4 * padded for size, padded in pieces], 1)
    total = mask.shape[1]
    inputs = make_inputs(3, total, grad=gradients)
    bias = torch.randn(total, total, dtype=torch.float64, requires_grad=gradients)
    state, outputs, start = empty_cache(*inputs[1:]), [], 0
    with torch.set_grad_enabled(gradients):
        for size, padded in pieces:
            here = slice(start, start := start + size)
            real = mask[:, here]
            batch = stream_batch(state.position, real.shape, real if padded else None)
            positions = (state.position[:, None] + torch.arange(size)).clamp(max=total - 1)
            tokens = [batch.pack(x[:, here].masked_fill(~real[..., None], torch.nan)) for x in inputs]
            rows = lambda n_keys, positions=positions: bias[positions, :n_keys]  # noqa: E731
            out, state = quadratic_attention_extend(*tokens, state, batch=batch, bias=rows, **own)
            outputs.append(batch.unpack(out))
    assert torch.equal(state.position, mask.sum(1))
    found, exact = torch.cat(outputs, 1), torch.zeros(3, total, 5, dtype=torch.float64)
    for row, real in enumerate(mask):  # alone: in a batch, a bias is indexed by place, padding included
        count = int(real.sum())
        alone = [x[row : row + 1, real] for x in inputs]
        exact[row, real] = quadratic_attention_oracle(*alone, causal=True, bias=bias[:count, :count], **own)[0]
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=0)
    if gradients and mask.any():
        direction = torch.randn_like(exact)
        results = (torch.autograd.grad((y * direction).sum(), (*inputs, bias)) for y in (found, exact))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def test_published_length_is_a_divisor_inside_the_square() -> None:
    q = torch.full((1, 2, 1), 3.0)
    v = torch.ones(1, 2, 1)
    published = quadratic_attention(q, q, v, normalization="paper")
    torch.testing.assert_close(published, torch.full((1, 2, 1), 2 * (9 / 2) ** 2))
    torch.testing.assert_close(quadratic_attention(q, q, v, normalization=6), torch.full((1, 2, 1), 2 * (9 / 6) ** 2))


# The tiled form -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUERIES", 16)
    monkeypatch.setattr(cpu, "SCORES", 2048)


def values_and_gradients(inputs: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    q, k, v, bias = inputs
    out = quadratic_attention(q, k, v, bias=bias, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.usefixtures("small_tiles", "work")
@every_pair(length=[1, 65], causal=[False, True], padded=[False, True])
def test_tiled_form_is_the_plain_one_at_ragged_lengths(length: int, causal: bool, padded: bool) -> None:
    bias = torch.randn(length, length, dtype=torch.float64, requires_grad=True)
    inputs = (*make_inputs(5, length, grad=True), bias)
    options: dict[str, Any] = {"causal": causal, "mask": torch.rand(5, length) > 0.3 if padded else None}
    torch.use_deterministic_algorithms(True)  # which also fills fresh memory with NaN
    try:
        tiled, again, plain = (values_and_gradients(inputs, **options, backend=b) for b in ("tiled", "tiled", "torch"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(tiled, again, strict=True))
    for fast, exact in zip(tiled, plain, strict=True):
        torch.testing.assert_close(fast, exact, atol=1e-9, rtol=0)


@every_pair(backend=["tiled", "torch", "oracle"], normalization=["count", "paper", 7])
def test_factored_bias_is_its_product(backend: Any, normalization: Any) -> None:
    inputs = make_inputs(2, 9, grad=True)
    factors = FactoredBias(*torch.randn(2, 9, 4, dtype=torch.float64).requires_grad_().unbind(0))
    options: dict[str, Any] = {"mask": torch.rand(2, 9) > 0.3, "normalization": normalization}
    factored = quadratic_attention(*inputs, bias=factors, backend=backend, **options)
    dense = quadratic_attention(*inputs, bias=factors.of_queries @ factors.of_keys.mT, backend="torch", **options)
    torch.testing.assert_close(factored, dense, atol=1e-10, rtol=0)
    wanted = (*inputs, *factors)
    gradients = [torch.autograd.grad(out.square().sum(), wanted, retain_graph=True) for out in (factored, dense)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.float32, False), (torch.bfloat16, True)])
def test_tiled_errors_are_at_most_twice_those_of_plain_pytorch(dtype: torch.dtype, with_bias: bool) -> None:
    parts = (*make_inputs(2, 300), *([torch.randn(300, 300, dtype=torch.float64)] if with_bias else []))
    exact = tuple(x.to(dtype).double().detach().requires_grad_() for x in parts)
    rounded = tuple(x.detach().to(dtype).requires_grad_() for x in exact)

    def run(inputs: tuple[Tensor, ...], backend: Any) -> list[Tensor]:
        bias = inputs[3] if with_bias else None
        out = quadratic_attention(inputs[0], inputs[1], inputs[2], bias=bias, causal=True, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    truth = run(exact, "torch")
    for true, ours, theirs in zip(truth, run(rounded, "tiled"), run(rounded, "torch"), strict=True):
        error, plain_error = ((x.double() - true).abs().max() / true.abs().max() for x in (ours, theirs))
        assert error < 2 * plain_error + torch.finfo(dtype).eps


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan_in_the_tiled_form(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in make_inputs(1, 6))
    k[0, 3] = torch.nan
    out = quadratic_attention(q, k, v, causal=True, backend="tiled")
    assert out[0, 3:].isnan().all()


def test_no_scores_are_kept_for_the_backward_pass() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in make_inputs(1, 2048))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        quadratic_attention(q, k, v, causal=True)
    assert sum(kept) < 2048 * 64


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("work", ["native"], indirect=True)
def test_pytorch_can_check_and_compile_the_tiled_form() -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in make_inputs(2, 10))
    bias = torch.randn(10, 10, requires_grad=True)
    for arguments in ((q, k, v, bias), (q, k, v, None)):
        torch.library.opcheck(cpu._fused.operator, (*arguments, torch.full((2, 10), 0.1), 0.4, True, "relu2", True))

    def run(*x: Tensor) -> Tensor:
        return quadratic_attention(*x[:3], bias=x[3], causal=True, backend="tiled")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = [
        (out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias)))
        for out in (run(q, k, v, bias), compiled(q, k, v, bias))
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["torch", "oracle"])
def test_bias_of_each_row_is_read_by_its_row(backend: Any) -> None:
    q, k, v = make_inputs(2, 9)
    bias, real = torch.randn(2, 9, 9, dtype=torch.float64), torch.arange(9) < torch.tensor([[9], [5]])
    out = attend_rows(q, k, v, bias, real, QuadraticOptions(causal=True), backend)
    for row, length in enumerate((9, 5)):
        own = [x[row : row + 1, :length] for x in (q, k, v)]
        expected = quadratic_attention_oracle(*own, causal=True, bias=bias[row, :length, :length])
        torch.testing.assert_close(out[row : row + 1, :length], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 5, 2, dtype=torch.long)}, "q has dtype torch.int64, but must have a floating-point dtype"),
        ({"k": [[[0.0]]]}, "k is a list, but must be a tensor"),
        ({"mask": torch.ones(5, dtype=torch.bool)}, r"mask has shape \[5\]"),
        ({"bias": torch.zeros(1, 5)}, r"bias has shape \[1, 5\]"),
        ({"bias": FactoredBias(torch.ones(5, 2), torch.ones(5, 3))}, r"bias has factors of shapes \[5, 2\] and \[5, 3\]"),
        ({"normalization": 2.5}, "normalization is 2.5"),
        ({"normalization": True}, "normalization is True"),
        ({"backend": "tiled", "activation": "softmax"}, "backend is 'tiled', which cannot run here: it has no activation"),
    ],
)
def test_inputs_that_no_attention_can_read_are_named(change: dict[str, Any], message: str) -> None:
    inputs = {name: torch.randn(1, 5, 2) for name in "qkv"}
    with pytest.raises(ArgumentError, match=message):
        quadratic_attention(**{**inputs, **change})
