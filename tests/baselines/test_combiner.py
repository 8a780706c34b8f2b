"""Combiner: one softmax over the tokens of the own chunk and the summaries of the others, as the own column sees them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lineartime.baselines.combiner import Combiner, combiner_attention, combiner_attention_oracle
from lineartime.layers import Attention
from lineartime.models import presets
from lineartime.models.cost import cost


def summaries(o: Tensor, x: Tensor, positions: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A summary of two heads that depends on all that it is given."""
    return ((x + o @ w1).tanh() @ w2 * (1 + positions[..., None]).log()).unflatten(-1, (2, -1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_the_chunked_form_is_the_definition(causal: bool, length: int, assert_same_function: Callable[..., None]) -> None:
    assert_same_function(
        lambda q, k, v, x, *maps: combiner_attention(
            q[None], k[None], v[None], x[None], lambda *cells: summaries(*cells, *maps), chunk_size=4, causal=causal
        )[0],
        lambda q, k, v, x, *maps: combiner_attention_oracle(
            q, k, v, x, lambda *cells: summaries(*cells, *maps), chunk_size=4, causal=causal
        ),
        *(torch.randn(2, length, 3) for _ in range(3)),
        torch.randn(length, 6),
        *(torch.randn(6, 6) for _ in range(2)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_the_layer_is_the_definition_on_its_projections(causal: bool) -> None:
    """With rotary positions of the cells, so that scores depend on distances alone."""
    mixer = Combiner(8, n_heads=2, chunk_size=4, causal=causal).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 14, 8, dtype=torch.float64)
    normed = mixer.norm(x)
    q, k, v = mixer.project(normed, mixer.describe(x.shape, device=x.device))
    own = v[0, ..., :4]
    heads = combiner_attention_oracle(q[0], k[0], own, normed[0], mixer.key_summary, chunk_size=4, causal=causal)
    torch.testing.assert_close(mixer(x), x + mixer.to_output(heads.transpose(0, 1).flatten(1))[None])


def test_summaries_are_rotated_by_the_positions_of_their_cells() -> None:
    """A document that begins with whole chunks of other tokens, which nothing reads, gives the scores of the document alone."""
    mixer = Combiner(8, n_heads=2, chunk_size=4).double()
    torch.nn.init.normal_(mixer.summary_to_key.weight)
    o, x, query = torch.randn(3, 5, 8, dtype=torch.float64).unbind(0)
    near, far = (mixer.key_summary(o, x, torch.full((5,), position)) for position in (2, 102))
    turned = [mixer.key_summary(query, query, torch.full((5,), position)) for position in (6, 106)]
    scores = [(q * k).sum(-1) for q, k in zip(turned, (near, far), strict=True)]
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.allclose(near, far)


@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_softmax_attention(causal: bool) -> None:
    mixer, plain = Combiner(16, n_heads=2, chunk_size=8, causal=causal), Attention(16, n_heads=2, causal=causal)
    mixer.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(mixer(x), plain(x))


def test_a_token_reads_of_other_chunks_what_its_own_column_sees() -> None:
    """Two queries of the same row, alike but for their columns, read different summaries."""
    maps = torch.randn(6, 6), torch.randn(6, 6)
    q, k, v = (torch.randn(1, 2, 8, 3) for _ in range(3))
    x = torch.randn(1, 8, 6)
    q[:, :, 5] = q[:, :, 4]
    out = combiner_attention(q, k, v, x, lambda *cells: summaries(*cells, *maps), chunk_size=4)
    assert not torch.allclose(out[:, :, 4], out[:, :, 5])


def test_the_two_maps_of_summaries_make_the_parameters_that_the_paper_counts() -> None:
    plain, combiner = (cost(presets()[f"{name}-base"], 1024).parameters for name in ("transformer+", "combiner"))
    d_model, n_layers = 768, 12
    assert combiner - plain == n_layers * (2 * d_model * d_model + 4 * d_model)


def test_the_state_keeps_two_vectors_of_every_token_of_closed_chunks() -> None:
    mixer = Combiner(16, n_heads=2, chunk_size=8, causal=True)
    _, state = mixer.extend(torch.randn(1, 83, 16), mixer.init_state(1))
    assert state.k_sum.shape == state.o.shape == (1, 2, 10, 8, 8)
    assert state.k.shape == (1, 2, 8, 8)


@pytest.mark.parametrize("name", ["summary_of_heads", "summary_to_key"])
def test_an_adapter_of_the_summaries_is_applied_and_learns(name: str) -> None:
    mixer = Combiner(8, n_heads=2, chunk_size=4).double()
    x = torch.randn(1, 14, 8, dtype=torch.float64)
    before = mixer(x)
    part = mixer.get_submodule(name)
    adapter = torch.nn.Linear(8, 8).double()
    part.register_forward_hook(lambda module, inputs, output: output + adapter(inputs[0]))
    after = mixer(x)
    assert not torch.allclose(before, after)
    after.square().sum().backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.abs().sum() > 0
