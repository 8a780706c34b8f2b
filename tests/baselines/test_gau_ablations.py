"""GAU with several heads, GAU without a gate, and heads with relu^2 or a gate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import definitions
from tests.definitions import assert_same_function, noisy
from torch import Tensor

from lineartime.baselines import GAUMultiHead, GAUUngated, MHSAGated, MHSARelu2
from lineartime.layers import GAU, Attention, set_backend
from lineartime.ops import rope

POSITIONS = torch.arange(7)
X = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def gau(layer: Any, x: Tensor) -> Tensor:
    """The formula of a GAU with two heads, or with one and without a gate."""
    projected = F.silu(layer.to_gate_value_base(layer.norm(x)))
    u, v, z = projected.split([32, 32, 8] if layer.n_heads == 2 else [0, 64, 8], -1)
    heads, (width, e) = [], (8 // layer.n_heads, v.shape[-1] // layer.n_heads)
    for h in range(layer.n_heads):
        part = slice(width * h, width * (h + 1))
        q, k = (rope(z[..., part] * layer.gamma[m, part] + layer.beta[m, part], POSITIONS) for m in range(2))
        heads.append(definitions.quadratic(q, k, v[..., e * h : e * (h + 1)], causal=layer.causal, bias=layer.bias(7)))
    attended = torch.cat(heads, -1)
    return torch.as_tensor(layer.to_output(u * attended if layer.n_heads == 2 else attended))


def relu2(layer: Any, x: Tensor) -> Tensor:
    q, k, v = layer.to_qkv(layer.norm(x)).split(16, -1)
    parts = slice(0, 8), slice(8, 16)
    heads = [(rope(q[..., part], POSITIONS), rope(k[..., part], POSITIONS), v[..., part]) for part in parts]
    return torch.as_tensor(
        layer.to_output(torch.cat([definitions.quadratic(*each, causal=layer.causal) for each in heads], -1))
    )


def gated(layer: Any, x: Tensor) -> Tensor:
    plain = Attention(16, n_heads=2, causal=layer.causal).double()
    plain.to_qkv, plain.norm, plain.to_output = layer.to_qkv, layer.norm, torch.nn.Identity()  # type: ignore[assignment]
    return torch.as_tensor(layer.to_output(F.silu(layer.to_gate(layer.norm(x))) * (plain(x) - x)))


ROWS: list[tuple[Any, dict[str, Any], Callable[[Any, Tensor], Tensor]]] = [
    (GAUMultiHead, {"n_heads": 2, "d_qk": 8}, gau),
    (GAUUngated, {"d_qk": 8}, gau),
    (MHSARelu2, {"n_heads": 2}, relu2),
    (MHSAGated, {"n_heads": 2}, gated),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("mixer", "options", "formula"), ROWS)
def test_ablation_is_its_formula(mixer: Any, options: dict[str, Any], formula: Any, causal: bool) -> None:
    layer = noisy(mixer(16, causal=causal, **options)).double()
    assert_same_function(layer, lambda x: x + formula(layer, x), X)


def test_four_heads_of_a_gau_cost_no_parameters() -> None:
    GAU(16, d_qk=8).load_state_dict(GAUMultiHead(16, n_heads=4, d_qk=8).state_dict())


def test_scores_of_every_head_start_near_one_if_asked() -> None:
    layer = GAUMultiHead(64, d_qk=64, n_heads=4, initial_scores="unit", rope=False)
    q, k = layer.rotated(F.silu(torch.randn(50, 64)), layer.describe((1, 50), device=torch.device("cpu")), 2)
    scores = (q[1:] * k[:-1]).sum(-1).mean(0) / 16**0.5
    assert ((scores > 0.7) & (scores < 3)).all()
    torch.testing.assert_close((layer.beta[0] * layer.beta[1]).unflatten(0, (4, 16)).sum(-1) / 16**0.5, torch.ones(4))


def test_relu2_ablation_follows_the_backend_that_its_errors_advise() -> None:
    layer = MHSARelu2(16, n_heads=2)
    x = torch.randn(1, 9, 16, requires_grad=True)
    set_backend(layer, "torch")
    [first] = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()  # "tiled" refuses it
    set_backend(layer, "tiled")
    with pytest.raises(RuntimeError, match=r"or set_backend\(model, 'torch'\)"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
