"""Explicit top-k: both forms against the definition, equal scores, and what is read."""

from collections.abc import Callable

import pytest
import torch
from tests.pairs import every_pair

from lineartime.baselines import explicit_topk
from lineartime.baselines.explicit_topk import (
    ExplicitTopK,
    explicit_topk_attention_extend,
    explicit_topk_attention_oracle,
)
from lineartime.ops import KVCache
from lineartime.ops.make_batch import stream_batch


@every_pair(length=[1, 3, 4, 17], causal=[False, True], n_largest=[1, 4])
def test_values_and_gradients_are_those_of_the_definition(
    length: int, causal: bool, n_largest: int, assert_heads_are_the_definition: Callable[..., None]
) -> None:
    layer = ExplicitTopK(12, n_heads=2, n_largest=n_largest, causal=causal)
    assert_heads_are_the_definition(
        layer.attend,
        lambda _, q, k, v: explicit_topk_attention_oracle(q, k, v, n_largest=n_largest, causal=causal),
        *(torch.randn(2, 2, length, 6) for _ in range(3)),
    )


def test_only_the_largest_scores_are_read() -> None:
    q, k, values = torch.ones(1, 1, 9, 1), torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6, 5])[None, None, :, None], torch.eye(9)
    reads = ExplicitTopK(9, n_heads=1, rope=False, n_largest=3).attend(q, k, values[None, None], None)[0, 0, 0]
    assert reads.nonzero().flatten().tolist() == [4, 5, 7, 8]  # 9, 6 and both 5
    causal = ExplicitTopK(9, n_heads=1, rope=False, n_largest=3, causal=True)
    assert causal.attend(q, k, values[None, None], None)[0, 0, 4].nonzero().flatten().tolist() == [0, 2, 4]


@pytest.mark.parametrize("causal", [False, True])
def test_equal_scores_are_read_alike(causal: bool) -> None:
    zeros, values = torch.zeros(1, 1, 7, 4), torch.randn(1, 1, 7, 4)
    out = ExplicitTopK(4, n_heads=1, n_largest=2, causal=causal).attend(zeros, zeros, values, None)
    torch.testing.assert_close(out[:, :, -1], values.mean(2))


@pytest.mark.parametrize("compared", [1, 50, 2**20])
def test_streaming_is_the_causal_form_however_many_pairs_are_compared(monkeypatch: pytest.MonkeyPatch, compared: int) -> None:
    monkeypatch.setattr(explicit_topk, "COMPARED", compared)
    q, k, v = (torch.randn(2, 2, 23, 6, dtype=torch.float64) for _ in range(3))
    state, pieces = KVCache(torch.zeros(2, dtype=torch.long), k[:, :, :0], v[:, :, :0]), []
    for new in (slice(0, 2), slice(2, 2), slice(2, 14), slice(14, 23)):
        parts = q[:, :, new], k[:, :, new], v[:, :, new]
        batch = stream_batch(state.position, (2, parts[0].shape[2]))
        piece, state = explicit_topk_attention_extend(*parts, state, batch, n_largest=3)
        pieces.append(piece)
    whole = ExplicitTopK(12, n_heads=2, n_largest=3, causal=True).attend(q, k, v, None)
    torch.testing.assert_close(torch.cat(pieces, 2), whole, atol=1e-10, rtol=0)
