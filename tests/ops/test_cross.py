"""Cross-attention of gated units against its definition."""

from typing import Any

import pytest
import torch
from tests.definitions import cross_attention_oracle
from tests.pairs import every_pair
from torch import Tensor

from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.cross import cross_attention


def make_inputs(queries: int, source: int, heads: tuple[int, ...] = (), grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((queries, 6), (source, 6), (source, 5))
    q, k, v = (torch.randn(3, *heads, *size, dtype=torch.float64).requires_grad_(grad) for size in sizes)
    return q, k, v


def make_mask(source: int) -> Tensor:
    mask = torch.rand(3, source) > 0.4
    mask[0] = False  # a row without any real token
    return mask


@every_pair(sizes=[(1, 1), (4, 7), (7, 4)], heads=[(), (2,)], padded=[False, True], activation=ACTIVATIONS)
def test_values_and_gradients_are_those_of_the_definition(
    sizes: tuple[int, int], heads: tuple[int, ...], padded: bool, activation: Any
) -> None:
    queries, source = sizes
    inputs = make_inputs(queries, source, heads, grad=True)
    mask = make_mask(source) if padded else None
    fast = cross_attention(*inputs, source_mask=mask, activation=activation)
    exact = cross_attention_oracle(*inputs, source_mask=mask, activation=activation)
    torch.testing.assert_close(fast, exact, atol=1e-10, rtol=0)
    weights = torch.randn_like(exact)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (fast, exact)]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("heads", [(), (2,)])
def test_padding_may_hold_anything_forward_and_backward(heads: tuple[int, ...]) -> None:
    q, k, v = make_inputs(4, 5, heads, grad=True)
    mask = make_mask(5)
    padding = ~mask.view(3, *[1] * len(heads), 5, 1)
    out = cross_attention(q, k.masked_fill(padding, torch.inf), v.masked_fill(padding, torch.nan), source_mask=mask)
    assert torch.equal(out, cross_attention(q, k, v, source_mask=mask))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_autocast_stays_finite_on_large_inputs(activation: Any) -> None:
    inputs = [(1e3 * x.detach().float()).requires_grad_() for x in make_inputs(4, 7)]
    with torch.autocast("cpu", dtype=torch.float16):
        out = cross_attention(inputs[0], inputs[1], inputs[2], source_mask=make_mask(7), activation=activation)
    out.float().mean().backward()
    assert out.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "gelu"}, "activation is 'gelu', but must be one of 'relu2'"),
        ({"k": torch.zeros(3, 5, 7)}, r"k has shape \[3, 5, 7\]"),
        ({"source_mask": torch.ones(5, dtype=torch.bool)}, r"source_mask has shape \[5\], but must be \[B, T\] = \[3, 5\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    arguments = {"q": torch.zeros(3, 4, 6), "k": torch.zeros(3, 5, 6), "v": torch.zeros(3, 5, 4), **changes}
    with pytest.raises(ValueError, match=message):
        cross_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
