"""Combiner: one softmax over the tokens of the own chunk and the summaries of the others, as the own column sees them."""

from collections.abc import Callable

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines.combiner import Combiner, combiner_attention_oracle


@every_pair(causal=[False, True], length=[1, 4, 5, 17])
def test_layer_is_the_definition_on_its_projections(
    causal: bool, length: int, assert_same_function: Callable[..., None]
) -> None:
    """With rotary positions of the cells, so that scores depend on distances alone."""
    mixer = Combiner(8, n_heads=2, chunk_size=4, causal=causal).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    def definition(x: Tensor) -> Tensor:
        normed = mixer.norm(x)
        q, k, v = (heads.transpose(0, 1) for heads in mixer.project(normed[0], mixer.describe(x.shape, device=x.device)))
        heads = combiner_attention_oracle(q, k, v[..., :4], normed[0], mixer.key_summary, chunk_size=4, causal=causal)
        return torch.as_tensor(x + mixer.to_output(heads.transpose(0, 1).flatten(1))[None])

    assert_same_function(mixer, definition, torch.randn(1, length, 8))


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


@pytest.mark.parametrize("name", ["summary_of_heads", "summary_to_key"])
def test_adapter_of_the_summaries_is_applied_and_learns(name: str) -> None:
    mixer = Combiner(8, n_heads=2, chunk_size=4).double()
    x = torch.randn(1, 14, 8, dtype=torch.float64)
    before = mixer(x)
    adapter = torch.nn.Linear(8, 8).double()
    mixer.get_submodule(name).register_forward_hook(lambda module, inputs, output: output + adapter(inputs[0]))
    after = mixer(x)
    assert not torch.allclose(before, after)
    after.square().sum().backward()
    assert adapter.weight.grad is not None
    assert adapter.weight.grad.any()
