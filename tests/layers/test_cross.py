"""The gated attention unit that reads another sequence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import assert_same_with_gradients, cross_attention_oracle, noisy
from torch import Tensor

from lineartime.layers.cross import CrossGAU


def make_layer(**arguments: Any) -> CrossGAU:
    """A layer of width 8 whose parameters all matter."""
    layer: CrossGAU = noisy(CrossGAU(8, **{"d_qk": 4, **arguments}).double())
    return layer


def make_inputs(queries: int = 6, source: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(2, queries, 8, dtype=torch.float64), torch.randn(2, source, 8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("n_heads", "gated", "padded"), [(1, True, False), (2, True, True), (1, False, True), (4, False, False)]
)
@pytest.mark.parametrize("activation", ["relu2", "softmax"])
def test_cross_gau_and_its_gradients_are_those_of_its_formula(n_heads: int, gated: bool, padded: bool, activation: Any) -> None:
    layer, inputs = make_layer(n_heads=n_heads, gated=gated, activation=activation), make_inputs()
    mask = torch.arange(9) % 4 > torch.tensor([[0], [3]]) if padded else None  # the second source has no real token
    x, source = (tokens.requires_grad_() for tokens in inputs)
    normed = F.layer_norm(x, (8,), layer.norm.weight, layer.norm.bias)
    widths = (16, 16) if gated else (0, 32)
    u, zq = F.silu(F.linear(normed, layer.to_gate_query.weight, layer.to_gate_query.bias)).split([widths[0], 4], -1)
    v, zk = F.silu(F.linear(source, layer.to_value_key.weight, layer.to_value_key.bias)).split([widths[1], 4], -1)
    q, k = (z * gamma + beta for z, gamma, beta in zip((zq, zk), layer.gamma, layer.beta, strict=True))
    heads = zip(*(part.chunk(n_heads, -1) for part in (q, k, v)), strict=True)
    attended = torch.cat([cross_attention_oracle(*head, source_mask=mask, activation=activation) for head in heads], -1)
    expected = x + F.linear(u * attended if gated else attended, layer.to_output.weight, layer.to_output.bias)
    found = layer(x, source, source_mask=mask)
    assert_same_with_gradients(found, expected, [x, source, *layer.parameters()], atol=1e-12)


@pytest.mark.parametrize("n_heads", [1, 4])
def test_new_layer_reads_the_average_of_its_source(n_heads: int) -> None:
    layer, (x, source) = CrossGAU(64, n_heads=n_heads), torch.randn(2, 2, 7, 64)
    layer.attend(x, layer.project_source(source)).sum().backward()
    products = layer.beta[0].view(n_heads, -1) * layer.beta[1].view(n_heads, -1)
    torch.testing.assert_close(products.sum(-1) * (128 / n_heads) ** -0.5, torch.ones(n_heads))
    assert layer.gamma.grad is not None
    assert layer.gamma.grad.abs().max() > 1e-5  # N(0, 0.02) and 0, as in a GAU, would leave 1e-12


def test_padding_on_either_side_changes_nothing() -> None:
    layer, (x, source) = make_layer(n_heads=2), make_inputs()
    alone = layer(x[:, 1:4], source[:, 2:7])
    mask, source_mask = torch.zeros(2, 6, dtype=torch.bool), torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 1:4] = source_mask[:, 2:7] = True
    dirty_x, dirty_source = (
        tokens.masked_fill(~real[..., None], torch.nan) for tokens, real in ((x, mask), (source, source_mask))
    )
    padded = layer(dirty_x, dirty_source, mask, source_mask)
    torch.testing.assert_close(padded[:, 1:4], alone, atol=1e-12, rtol=0)
    assert not padded[:, [0, 4, 5]].any()


@pytest.mark.parametrize("activation", ["relu2", "softmax"])
def test_half_precision_autocast_stays_finite_with_large_scores(activation: Any) -> None:
    layer, inputs = make_layer(n_heads=2, activation=activation).float(), make_inputs()
    x, source = (tokens.float().requires_grad_() for tokens in inputs)
    with torch.no_grad():  # squares of scores beyond 65,504, of small values
        layer.gamma.mul_(40)
        layer.to_value_key.weight[:16] *= 1e-4
        layer.to_value_key.bias[:16] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        out = layer(x, source, source_mask=torch.arange(9) < torch.tensor([[5], [0]]))
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.float().mean(), [x, source]))
