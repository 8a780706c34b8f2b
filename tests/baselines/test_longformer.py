"""Longformer: the parallel and the streaming form against the definition. W = 4, so that several blocks stay cheap."""

from collections.abc import Callable

import torch
from tests.pairs import every_pair

from lineartime.baselines.longformer import Longformer, longformer_attention, longformer_attention_oracle

LENGTHS = [1, 3, 4, 5, 8, 17]


@every_pair(length=LENGTHS, causal=[False, True], sizes=[(1, 1), (4, 2), (4, 9)])
def test_values_and_gradients_are_those_of_the_definition(
    length: int, causal: bool, sizes: tuple[int, int], assert_heads_are_the_definition: Callable[..., None]
) -> None:
    options = {"window": sizes[0], "n_global": sizes[1], "causal": causal}
    assert_heads_are_the_definition(
        lambda q, k, v, real: longformer_attention(q, k, v, **options, real=real),
        lambda _, q, k, v: longformer_attention_oracle(q, k, v, **options),
        *(torch.randn(2, 2, length, 6) for _ in range(3)),
    )


def test_a_token_reads_its_window_and_the_global_tokens_which_read_everything() -> None:
    zeros, values = torch.zeros(1, 1, 12, 12), torch.eye(12)[None, None]  # equal scores; each output shows who was read
    reads = longformer_attention(zeros, zeros, values, window=3, n_global=2, causal=True)[0, 0] > 0
    assert reads[8].nonzero().flatten().tolist() == [0, 1, 6, 7, 8]
    assert reads[1].nonzero().flatten().tolist() == [0, 1]
    both = longformer_attention(zeros, zeros, values, window=3, n_global=2, causal=False)[0, 0]
    assert (both[8] > 0).nonzero().flatten().tolist() == [0, 1, 6, 7, 8, 9, 10]
    torch.testing.assert_close(both[:2], torch.full((2, 12), 1 / 12))
    torch.testing.assert_close(both[2, :5], torch.full((5,), 1 / 5))  # global tokens inside the window count once


def test_memory_of_a_stream_stops_growing_and_a_long_prompt_is_read_by_windows() -> None:
    layer = Longformer(16, n_heads=2, window=4, n_global=6, causal=True)
    x = torch.randn(1, 50, 16)
    out, state = layer.extend(x, layer.init_state(1))
    torch.testing.assert_close(out, layer(x), atol=1e-6, rtol=0)
    assert [part.shape[2] for part in (state.k_global, state.v_global, state.k, state.v)] == [6, 6, 3, 3]
