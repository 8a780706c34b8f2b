"""GAU and FLASH against their formulas, and what is theirs alone."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests import definitions
from tests.definitions import noisy
from torch import Tensor

from lineartime.baselines import Performer
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU, Attention, RotaryBias, TableBias
from lineartime.layers.mixer import Mixer
from lineartime.ops import rope
from lineartime.ops.state import State


@pytest.mark.parametrize("chunked", [False, True])
def test_layer_is_its_formula(chunked: bool) -> None:
    flash, gau = FLASH(8, d_qk=4, chunk_size=4, causal=True, norm="scalenorm"), GAU(8, d_qk=4, max_length=11)
    layer = noisy((flash if chunked else gau).double())
    x = torch.randn(1, 11, 8, dtype=torch.float64)
    if chunked:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * layer.norm.g
    else:
        normed = F.layer_norm(x, (8,), layer.norm.weight, layer.norm.bias)
    u, v, z = F.silu(F.linear(normed, layer.to_gate_value_base.weight, layer.to_gate_value_base.bias)).split([16, 16, 4], -1)
    maps = [rope(z * gamma + beta, torch.arange(11)) for gamma, beta in zip(layer.gamma, layer.beta, strict=True)]
    assert isinstance(layer.bias, TableBias)
    if chunked:
        attended = definitions.mixed_chunk(*maps, v, chunk_size=4, causal=True, bias=layer.bias.table)
    else:
        attended = definitions.quadratic(*maps, v, bias=layer.bias.table)
    expected = x + F.linear(u * attended, layer.to_output.weight, layer.to_output.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


def test_form_of_the_bias_follows_from_the_configuration_alone() -> None:
    for n, form in ((512, TableBias), (513, RotaryBias), (None, RotaryBias)):
        assert isinstance(GAU(8, d_qk=4, max_length=n).bias, form)
    for n, form in ((512, TableBias), (513, RotaryBias)):
        assert isinstance(FLASH(8, d_qk=4, chunk_size=n).bias, form)
    assert GAU(8, d_qk=4, relative_bias=False).bias is None


def test_input_beyond_the_table_is_an_error_that_says_what_to_do() -> None:
    layer = GAU(8, d_qk=4, causal=True, max_length=5)
    layer(torch.zeros(1, 5, 8))
    _, state = layer.extend(torch.zeros(1, 5, 8))
    streams = State.concatenate([state, layer.init_state(1)])  # at several positions
    message = "max_length is 5, .* but the sequence has 6 tokens: build it with a larger max_length"
    for read in (
        lambda: layer(torch.zeros(1, 6, 8)),
        lambda: layer.extend(torch.zeros(1, 1, 8), state),
        lambda: layer.extend(torch.zeros(2, 1, 8), streams),
    ):
        with pytest.raises(ArgumentError, match=message):
            read()


def test_padding_does_not_count_towards_the_table() -> None:
    layer = GAU(8, d_qk=4, max_length=5)
    x, mask = torch.randn(2, 9, 8), torch.arange(9) >= torch.tensor([[4], [6]])
    torch.testing.assert_close(layer(x, mask=mask)[0, 4:], layer(x[:1, 4:])[0], atol=1e-6, rtol=0)


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
    layer = noisy(FLASH(8, d_qk=4, chunk_size=4, causal=causal, dtype=torch.float64), 1.0)
    x = torch.randn(2, 11, 8, dtype=torch.float64)

    def gradients() -> list[Tensor]:
        out = layer(x)
        return [out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]

    joined, seen = gradients(), []
    layer.to_output.register_forward_hook(lambda module, arguments, out: seen.append(arguments[0].shape))
    apart = gradients()
    assert seen == [(22, 16)]
    torch.testing.assert_close(joined, apart, atol=1e-12, rtol=1e-12)


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


STREAMS: dict[str, Callable[..., Mixer]] = {
    "flash": partial(FLASH, d_qk=4, chunk_size=4),
    "gau": partial(GAU, d_qk=4),
    "attention": partial(Attention, n_heads=2),
    "performer": partial(Performer, n_heads=2),
}


@pytest.mark.parametrize("kind", STREAMS)
@torch.no_grad()
def test_streams_begun_in_another_precision_are_continued(kind: str) -> None:
    layer, x = STREAMS[kind](16, causal=True), torch.randn(1, 4 + 3, 16)
    _, state = layer.extend(x[:, :-1], None)
    whole, last = layer(x), x[:, -1:]
    for dtype in (torch.float64, torch.bfloat16):
        out, _ = layer.to(dtype).extend(last.to(dtype), state.clone())
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), whole[:, -1:], atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@torch.no_grad()
def test_step_in_half_precision_overflows_no_sooner_than_a_row() -> None:
    layer, x = FLASH(16, d_qk=8, chunk_size=8, causal=True, initial_scores="unit"), torch.randn(2, 9, 16).half()
    layer.to_gate_value_base.weight[-8:] *= 15
    layer.to_gate_value_base.weight[32:64] *= 1e-3
    layer.gamma[:2] = 60.0
    layer.half()
    state, stepped = layer.init_state(2), []
    for place in range(9):
        out, state = layer.extend(x[:, place, None], state)
        stepped.append(out)
    whole = layer(x)
    assert whole.isfinite().all()
    torch.testing.assert_close(torch.cat(stepped, 1), whole, atol=0.05, rtol=0.02)
