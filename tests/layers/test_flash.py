import pytest
import torch
import torch.nn.functional as F
from tests import definitions
from torch import Tensor

from lineartime.layers import FLASH, GAU, RotaryBias, TableBias
from lineartime.ops import rope


def test_flash_is_its_formula() -> None:
    layer = FLASH(8, d_qk=4, chunk_size=4, causal=True, norm="scalenorm").double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * layer.norm.g
    u, v, z = F.silu(F.linear(normed, layer.to_gate_value_base.weight, layer.to_gate_value_base.bias)).split([16, 16, 4], -1)
    heads = [rope(z * gamma + beta, torch.arange(11)) for gamma, beta in zip(layer.gamma, layer.beta, strict=True)]
    assert isinstance(layer.bias, TableBias)
    attended = definitions.mixed_chunk(*heads, v, chunk_size=4, causal=True, bias=layer.bias.table)
    expected = x + F.linear(u * attended, layer.to_output.weight, layer.to_output.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


def test_form_of_the_bias_follows_from_the_chunk_size() -> None:
    assert isinstance(FLASH(8, d_qk=4, chunk_size=512).bias, TableBias)
    assert isinstance(FLASH(8, d_qk=4, chunk_size=513).bias, RotaryBias)


def test_state_is_as_large_after_20_000_tokens_as_after_1_000() -> None:
    layer = FLASH(8, d_qk=4, chunk_size=256, causal=True)
    state = layer.init_state(1)
    sizes = {0: state.nbytes}
    with torch.no_grad():
        for read in (1_000, 20_000):
            _, state = layer.extend(torch.randn(1, read - int(state.position), 8), state)
            assert state.position.tolist() == [read]
            sizes[read] = state.nbytes
            assert all(part.untyped_storage().nbytes() <= sizes[0] for part in state.tensors())
    assert len(set(sizes.values())) == 1, sizes


@pytest.mark.parametrize("layer", [FLASH, GAU])
def test_scores_of_neighbours_start_near_one_if_asked(layer: type[FLASH] | type[GAU]) -> None:
    unit = layer(64, d_qk=32, initial_scores="unit")
    q, k = unit.rotated(F.silu(torch.randn(50, 32)), unit.describe((1, 50), device=torch.device("cpu")), unit.n_maps)[:2]
    near = (q[1:] * k[:-1]).sum(-1).mean() / 32**0.5
    far = (q[40:] * k[:10]).sum(-1).mean() / 32**0.5
    assert 0.8 < near < 4
    assert far < near / 2
    assert (unit.gamma[2:].abs() < 0.2).all()  # the linear part starts small, as published
    assert (layer(64, d_qk=32).gamma.abs() < 0.2).all()
    with torch.no_grad():
        unit.gamma.zero_()
    unit.reset_parameters()
    assert (unit.gamma[:2] == 1).all()


@pytest.mark.parametrize("causal", [False, True])
def test_output_map_with_a_hook_is_called_and_gives_the_same(causal: bool) -> None:
    torch.manual_seed(0)
    layer = FLASH(8, d_qk=4, chunk_size=4, causal=causal, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(2, 11, 8, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        out = layer(x)
        return [out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]

    joined, seen = gradients(), []
    layer.to_output.register_forward_hook(lambda module, arguments, out: seen.append(arguments[0].shape))
    apart = gradients()
    assert seen == [(22, 16)]
    for one, other in zip(joined, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["to_output", "to_gate_value_base"])
def test_backward_hook_on_a_map_is_called(name: str) -> None:
    layer, seen = FLASH(8, d_qk=4, chunk_size=4), []
    layer.get_submodule(name).register_full_backward_hook(lambda module, d_in, d_out: seen.append(len(d_out[0])))
    layer(torch.randn(2, 11, 8, requires_grad=True)).sum().backward()
    assert seen == [22]


def test_stream_of_whole_chunks_is_compiled_as_one_graph() -> None:
    layer = FLASH(16, d_qk=8, chunk_size=4, causal=True).eval()
    x = torch.randn(2, 9, 16)
    with torch.no_grad():
        expected, _ = layer.extend(x, layer.init_state(2))
        compiled, _ = torch.compile(layer.extend, fullgraph=True, backend="eager")(x, layer.init_state(2))
    torch.testing.assert_close(compiled, expected)
