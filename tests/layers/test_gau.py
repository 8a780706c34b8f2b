import pytest
import torch
import torch.nn.functional as F
from tests import definitions

from lineartime.layers import GAU, RotaryBias, TableBias
from lineartime.ops import rope


def test_gau_is_its_formula() -> None:
    layer = GAU(8, d_qk=4, max_length=6).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    normed = F.layer_norm(x, (8,), layer.norm.weight, layer.norm.bias)
    u, v, z = F.silu(F.linear(normed, layer.to_gate_value_base.weight, layer.to_gate_value_base.bias)).split([16, 16, 4], -1)
    positions = torch.arange(6)
    q, k = (rope(z * gamma + beta, positions) for gamma, beta in zip(layer.gamma, layer.beta, strict=True))
    assert isinstance(layer.bias, TableBias)
    attended = definitions.quadratic(q, k, v, bias=layer.bias.table)
    expected = x + F.linear(u * attended, layer.to_output.weight, layer.to_output.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


def test_form_of_the_bias_follows_from_the_configuration_alone() -> None:
    assert isinstance(GAU(8, d_qk=4, max_length=512).bias, TableBias)
    assert isinstance(GAU(8, d_qk=4, max_length=513).bias, RotaryBias)
    assert isinstance(GAU(8, d_qk=4).bias, RotaryBias)
    assert GAU(8, d_qk=4, relative_bias=False).bias is None


def test_input_beyond_the_table_is_an_error_that_says_what_to_do() -> None:
    layer = GAU(8, d_qk=4, causal=True, max_length=5)
    layer(torch.zeros(1, 5, 8))
    message = "max_length is 5, .* but the sequence has 6 tokens: build it with a larger max_length"
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(1, 6, 8))
    _, state = layer.extend(torch.zeros(1, 5, 8))
    with pytest.raises(ValueError, match=message):
        layer.extend(torch.zeros(1, 1, 8), state)


def test_padding_does_not_count_towards_the_table() -> None:
    layer = GAU(8, d_qk=4, max_length=5)
    x, mask = torch.randn(2, 9, 8), torch.arange(9) >= torch.tensor([[4], [6]])
    torch.testing.assert_close(layer(x, mask=mask)[0, 4:], layer(x[:1, 4:])[0], atol=1e-6, rtol=0)


def test_function_without_a_table_does_not_change_past_512_tokens() -> None:
    layer = GAU(8, d_qk=4, causal=True)
    x = torch.randn(1, 514, 8)
    torch.testing.assert_close(layer(x)[:, :512], layer(x[:, :512]), atol=1e-5, rtol=0)


def test_constant_of_the_published_normalisation_is_max_length() -> None:
    x = torch.randn(1, 6, 8)
    layers = [GAU(8, d_qk=4, causal=True, normalization="paper", relative_bias=False, max_length=n) for n in (None, 512, 32)]
    with torch.no_grad():
        for parameter in layers[0].parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    torch.testing.assert_close(layers[0](x), layers[1](x))
    assert not torch.equal(layers[1](x), layers[2](x))
