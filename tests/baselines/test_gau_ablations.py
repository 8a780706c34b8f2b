"""GAU with several heads, GAU without a gate, and heads with relu^2 or a gate."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from tests import definitions
from torch import Tensor

from lineartime.baselines.ablations import GAUMultiHead, GAUUngated, MHSAGated, MHSARelu2
from lineartime.layers import GAU, Attention, set_backend
from lineartime.layers.mixer import Mixer
from lineartime.ops import rope

POSITIONS = torch.arange(7)


AnyMixer = TypeVar("AnyMixer", bound=Mixer)
X = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def prepared(layer: AnyMixer) -> AnyMixer:
    """A layer far from silent, in float64."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.double()


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_of_a_gau_attends_by_itself(causal: bool, assert_same_function: Callable[..., None]) -> None:
    layer = prepared(GAUMultiHead(16, n_heads=2, d_qk=8, causal=causal, relative_bias=False))

    def formula(x: Tensor) -> Tensor:
        u, v, z = F.silu(layer.to_gate_value_base(layer.norm(x))).split([32, 32, 8], -1)
        heads = []
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            q, k = (rope(z[..., part] * layer.gamma[m, part] + layer.beta[m, part], POSITIONS) for m in range(2))
            heads.append(definitions.quadratic(q, k, v[..., 16 * h : 16 * h + 16], causal=causal))
        out: Tensor = x + layer.to_output(u * torch.cat(heads, -1))
        return out

    assert_same_function(layer, formula, X)


def test_one_head_of_a_gau_is_a_gau_and_four_cost_no_parameters() -> None:
    layer = prepared(GAUMultiHead(16, n_heads=1, d_qk=8))
    plain = GAU(16, d_qk=8).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(X), plain(X), atol=1e-10, rtol=0)
    plain.load_state_dict(GAUMultiHead(16, n_heads=4, d_qk=8).state_dict())


@pytest.mark.parametrize("causal", [False, True])
def test_gau_without_gate_has_values_of_twice_the_width(causal: bool, assert_same_function: Callable[..., None]) -> None:
    layer = prepared(GAUUngated(16, d_qk=8, causal=causal, relative_bias=False))

    def formula(x: Tensor) -> Tensor:
        v, z = F.silu(layer.to_gate_value_base(layer.norm(x))).split([64, 8], -1)
        q, k = (rope(z * layer.gamma[m] + layer.beta[m], POSITIONS) for m in range(2))
        out: Tensor = x + layer.to_output(definitions.quadratic(q, k, v, causal=causal))
        return out

    assert_same_function(layer, formula, X)


@pytest.mark.parametrize("causal", [False, True])
def test_relu2_attention_is_quadratic_attention_of_every_head(causal: bool, assert_same_function: Callable[..., None]) -> None:
    layer = prepared(MHSARelu2(16, n_heads=2, causal=causal))

    def formula(x: Tensor) -> Tensor:
        q, k, v = layer.to_qkv(layer.norm(x)).split(16, -1)
        heads = []
        for part in (slice(0, 8), slice(8, 16)):
            turned = (rope(q[..., part], POSITIONS), rope(k[..., part], POSITIONS))
            heads.append(definitions.quadratic(*turned, v[..., part], causal=causal))
        out: Tensor = x + layer.to_output(torch.cat(heads, -1))
        return out

    assert_same_function(layer, formula, X)


@pytest.mark.parametrize("causal", [False, True])
def test_gate_multiplies_what_attention_gives(causal: bool, assert_same_function: Callable[..., None]) -> None:
    layer = prepared(MHSAGated(16, n_heads=2, causal=causal))
    plain = Attention(16, n_heads=2, causal=causal).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if not name.startswith("to_gate")})
    with torch.no_grad():  # heads as they are
        plain.to_output.weight.copy_(torch.eye(16))
        plain.to_output.bias.zero_()

    def formula(x: Tensor) -> Tensor:
        attended = plain(x) - x
        out: Tensor = x + layer.to_output(F.silu(layer.to_gate(layer.norm(x))) * attended)
        return out

    assert_same_function(layer, formula, X)


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
