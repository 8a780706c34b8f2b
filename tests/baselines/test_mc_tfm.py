"""MC-TFM++: softmax inside chunks and linear attention across them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lineartime.baselines.mc_tfm import MCTFM, mc_tfm_attention, mc_tfm_attention_oracle
from lineartime.layers import Attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
def test_the_chunked_form_is_the_definition(causal: bool, length: int, assert_same_function: Callable[..., None]) -> None:
    assert_same_function(
        lambda q, k, v: mc_tfm_attention(q[None], k[None], v[None], chunk_size=4, causal=causal)[0],
        lambda q, k, v: mc_tfm_attention_oracle(q, k, v, chunk_size=4, causal=causal),
        *(torch.randn(length, 6) for _ in range(3)),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8])
def test_one_chunk_is_softmax_attention_and_nothing_more(causal: bool, length: int) -> None:
    mixer, plain = MCTFM(16, n_heads=2, chunk_size=8, causal=causal), Attention(16, n_heads=2, causal=causal)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    mixer.load_state_dict(plain.state_dict())
    x = torch.randn(2, length, 16)
    torch.testing.assert_close(mixer(x), plain(x))


def test_two_chunks_are_more_than_softmax_attention_inside_each() -> None:
    q, k, v = torch.randn(3, 1, 16, 6)
    mixed = mc_tfm_attention(q, k, v, chunk_size=8, causal=True)
    alone = [
        F.scaled_dot_product_attention(*(x[:, part] for x in (q, k, v)), is_causal=True) for part in (slice(8), slice(8, 16))
    ]
    torch.testing.assert_close(mixed[:, :8], alone[0])
    assert (mixed[:, 8:] - alone[1]).abs().max() > 0.01


def test_the_state_keeps_the_keys_of_the_open_chunk_once() -> None:
    state = MCTFM(16, n_heads=2, chunk_size=8, causal=True).init_state(1)
    assert [tuple(part.shape) for part in state.tensors()] == [(1,), (1, 2, 8, 8), (1, 2, 1, 8, 8), (1, 2, 8, 8)]
