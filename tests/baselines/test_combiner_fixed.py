"""Combiner, fixed: one softmax over the tokens of the own chunk and one summary of each other."""

from collections.abc import Callable

import pytest
import torch

from lineartime.baselines.combiner_fixed import CombinerFixed, combiner_fixed_attention, combiner_fixed_attention_oracle
from lineartime.layers import Attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_the_chunked_form_is_the_definition(causal: bool, length: int, assert_same_function: Callable[..., None]) -> None:
    assert_same_function(
        lambda q, k, v: combiner_fixed_attention(q[None], k[None], v[None], chunk_size=4, causal=causal)[0],
        lambda q, k, v: combiner_fixed_attention_oracle(q, k, v, chunk_size=4, causal=causal),
        *(torch.randn(2, length, 3) for _ in range(3)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_softmax_attention(causal: bool) -> None:
    mixer, plain = CombinerFixed(16, n_heads=2, chunk_size=8, causal=causal), Attention(16, n_heads=2, causal=causal)
    mixer.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(mixer(x), plain(x))


def test_the_state_grows_by_a_summary_for_every_chunk_and_not_by_every_token() -> None:
    mixer = CombinerFixed(16, n_heads=2, chunk_size=8, causal=True)
    _, state = mixer.extend(torch.randn(1, 83, 16), mixer.init_state(1))
    assert state.k_bar.shape == (1, 2, 10, 8)
    assert state.k.shape == (1, 2, 8, 8)
