"""Products of a few rows with a matrix, in C++."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.pairs import every_pair
from torch import Tensor

from lineartime.layers import dense as module
from lineartime.layers.dense import MAX_ROWS, dense
from lineartime.machine import using_threads
from lineartime.native import why_not_native

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f"functions in C++ cannot be built: {why_not_native()}")

TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions in C++ that are called."""
    names: list[str] = []
    made = module.native_functions

    class Counting:
        def __init__(self, dtype: torch.dtype) -> None:
            self.functions = made(module.SOURCE, dtype)

        def call(self, name: str, *arguments: Any) -> None:
            names.append(name)
            self.functions.call(name, *arguments)

    monkeypatch.setattr(module, "native_functions", lambda source, dtype: Counting(dtype))
    return names


def make(dtype: torch.dtype, rows: tuple[int, ...], k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)


SIZES: list[Any] = [((1, 1), 256, 1100), ((), 1, 1), ((2, 2), 33, 200), ((MAX_ROWS,), 95, 131)]


@every_pair(dtype=list(TOLERANCES), sizes=SIZES, with_bias=[False, True])
def test_dense_is_the_linear_map(dtype: torch.dtype, sizes: Any, with_bias: bool, native: list[str]) -> None:
    rows, k, n = sizes
    x, weight, bias = make(dtype, rows, k, n)
    bias_or_none = bias if with_bias else None
    with torch.no_grad(), using_threads(2):
        out, true = dense(x, weight, bias_or_none), F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert native == ["dense"]
    assert out.dtype == dtype
    assert out.shape == (*rows, n)
    assert (out - true).abs().max() <= TOLERANCES[dtype] * true.abs().max()


class OfOthers(Tensor):
    pass


def _with_gradients(*inputs: Tensor) -> Tensor:
    with torch.enable_grad():
        inputs = tuple(x.clone().requires_grad_() for x in inputs)
        ours, theirs = dense(*inputs), F.linear(*inputs)
        gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    return ours.detach()


def _in_autocast(*inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return dense(*inputs)


@pytest.mark.parametrize(
    ("run", "rows", "tolerance"),
    [
        (_with_gradients, 3, 1e-6),
        (_in_autocast, 3, 2e-2),
        (lambda *inputs: torch.compile(dense, backend="eager", fullgraph=True)(*inputs), 3, 1e-6),
        (lambda *inputs: torch.func.vmap(dense, (0, None, None))(*inputs), 3, 1e-6),
        (lambda x, weight, bias: dense(x, weight.mT.contiguous().mT, bias), 3, 1e-6),
        (lambda x, weight, bias: dense(x, weight.as_subclass(OfOthers), bias), 3, 1e-6),
        (dense, MAX_ROWS + 1, 1e-6),
        (dense, 0, 0.0),
        (lambda *inputs: dense(*(x.half() for x in inputs)), 3, 3e-3),
    ],
    ids=["gradients", "autocast", "compiled", "vmap", "transposed", "subclass", "many", "none", "half"],
)
def test_pytorch_computes_what_it_must_see_or_does_better(
    run: Callable[..., Tensor], rows: int, tolerance: float, native: list[str]
) -> None:
    x, weight, bias = make(torch.float32, (rows,), 16, 8)
    with torch.no_grad():
        out, true = run(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())
    assert native == []
    assert out.shape == true.shape == (rows, 8)
    assert rows == 0 or (out - true).abs().max() <= tolerance * true.abs().max()
