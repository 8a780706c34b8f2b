"""cosFormer: the linear form against the definition, and the longest sequence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lineartime.baselines.cosformer import CosFormer, cosformer_attention_oracle


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 5, 17])
def test_attention_by_features_is_the_definition(causal: bool, length: int, assert_same_function: Callable[..., None]) -> None:
    mixer = CosFormer(6, n_heads=1, causal=causal, max_length=17)
    assert_same_function(
        lambda q, k, v: mixer.attend(q[None, None], k[None, None], v[None, None], None)[0, 0],
        lambda q, k, v: cosformer_attention_oracle(q, k, v, max_length=17, causal=causal),
        # Some feature of every query and key is positive: a query that is similar to no key has no mean.
        *(torch.randn(length, 6) + torch.tensor([9.0, 0, 0, 0, 0, 0]) for _ in range(3)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_near_tokens_weigh_more_than_far_ones(causal: bool) -> None:
    mixer = CosFormer(16, n_heads=1, causal=causal, max_length=16)
    weights = mixer.attend(*torch.ones(2, 1, 1, 16, 4), torch.eye(16)[None, None], None)[0, 0, -1]
    assert (weights.diff() > 0).all()
    assert weights[0] < 0.1 * weights[-1]


def test_a_query_that_is_similar_to_no_key_reads_nothing() -> None:
    q, k = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[-1.0, 1.0]]]])
    mixer = CosFormer(2, n_heads=1, max_length=4)
    assert not mixer.attend(q, k, torch.ones(1, 1, 1, 2), None).any()


@pytest.mark.parametrize("packed", [False, True])
def test_only_the_longest_sequence_has_to_fit(packed: bool) -> None:
    layer = CosFormer(16, n_heads=2, max_length=8)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 1, 10])} if packed else {}
    with pytest.raises(ValueError, match="max_length is 8 in this CosFormer, but the sequence has 9 tokens"):
        layer(torch.zeros(1, 10 if packed else 9, 16), **options)
    assert layer(torch.zeros(1, 10, 16), cu_seqlens=torch.tensor([0, 2, 10])).shape == (1, 10, 16)
    assert layer.longest_sequence == 8


def test_a_stream_may_not_grow_beyond_the_longest_sequence() -> None:
    layer = CosFormer(16, n_heads=2, max_length=8, causal=True)
    _, state = layer.extend(torch.zeros(1, 7, 16), layer.init_state(1))
    layer.extend(torch.zeros(1, 1, 16), state)
    with pytest.raises(ValueError, match="max_length is 8 in this CosFormer, but the sequence has 9 tokens"):
        layer.extend(torch.zeros(1, 2, 16), state)
