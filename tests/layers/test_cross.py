"""The gated attention unit that reads another sequence."""

import zlib
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import cross_attention_oracle
from torch import Tensor

from lineartime.layers.cross import CrossGAU


def make_layer(**arguments: Any) -> CrossGAU:
    """A layer of width 8 whose parameters all matter."""
    layer = CrossGAU(8, **{"d_qk": 4, **arguments}).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            first = parameter.flatten()[0]
            centre = first if bool((parameter == first).all()) else torch.zeros((), dtype=torch.float64)
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def make_inputs(queries: int = 6, source: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randn(2, queries, 8, dtype=torch.float64), torch.randn(2, source, 8, dtype=torch.float64)


@pytest.mark.parametrize(("n_heads", "gated"), [(1, True), (2, True), (1, False), (4, False)])
@pytest.mark.parametrize("activation", ["relu2", "softmax"])
def test_cross_gau_and_its_gradients_are_those_of_its_formula(n_heads: int, gated: bool, activation: Any) -> None:
    layer, inputs = make_layer(n_heads=n_heads, gated=gated, activation=activation), make_inputs()
    x, source = (tokens.requires_grad_() for tokens in inputs)
    normed = F.layer_norm(x, (8,), layer.norm.weight, layer.norm.bias)
    widths = (16, 16) if gated else (0, 32)
    u, zq = F.silu(F.linear(normed, layer.to_gate_query.weight, layer.to_gate_query.bias)).split([widths[0], 4], -1)
    v, zk = F.silu(F.linear(source, layer.to_value_key.weight, layer.to_value_key.bias)).split([widths[1], 4], -1)
    q, k = (z * gamma + beta for z, gamma, beta in zip((zq, zk), layer.gamma, layer.beta, strict=True))
    heads = zip(*(part.chunk(n_heads, -1) for part in (q, k, v)), strict=True)
    attended = torch.cat([cross_attention_oracle(*head, activation=activation) for head in heads], -1)
    expected = x + F.linear(u * attended if gated else attended, layer.to_output.weight, layer.to_output.bias)
    out, weights = layer(x, source), torch.randn_like(x)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    parts = [x, source, *layer.parameters()]
    gradients = [torch.autograd.grad((each * weights).sum(), parts) for each in (out, expected)]
    for gradient, right in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-12, rtol=0)


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


def test_source_of_padding_leaves_the_input() -> None:
    layer, (x, source) = make_layer(), make_inputs()
    source_mask = torch.tensor([[False] * 9, [True] * 9])
    out = layer(x, source, source_mask=source_mask)
    torch.testing.assert_close(out[0], x[0] + layer.to_output.bias, atol=1e-12, rtol=0)
    torch.testing.assert_close(out[1], layer(x, source)[1], atol=1e-12, rtol=0)


def test_source_read_once_answers_in_any_pieces() -> None:
    layer, (x, source) = make_layer(n_heads=2), make_inputs()
    source_mask = torch.arange(9) < torch.tensor([[5], [9]])
    state = layer.project_source(source, source_mask)
    pieces = [layer.attend(x[:, start:stop], state) for start, stop in pairwise([0, 1, 1, 4, 6])]
    torch.testing.assert_close(torch.cat(pieces, 1), layer(x, source, source_mask=source_mask), atol=1e-12, rtol=0)
