"""Reformer's attention among given buckets against reformer-pytorch.

How it differs, and what is done about it here:
- It cuts all tokens, sorted by bucket, into chunks, so that a chunk may hold tokens of several buckets. Ours are cut inside
  each bucket, because the others show a causal token something of the future. The buckets here are whole numbers of chunks.
- It divides scores by sqrt(h) once more than ours: its queries are multiplied by sqrt(h). Unless told otherwise it reads other
  buckets in its chunks, and counts a pair once for every round: it is told here.
- The hash is random in both: buckets are given.
"""

import pytest
import torch
from tests.peers.packages import peer
from torch import Tensor

from lineartime.baselines.reformer import Reformer

CHUNK = 4
BATCH, HEADS, HEAD_DIM = 2, 3, 6


def shuffled_buckets(size: int, n_buckets: int, rounds: int) -> Tensor:
    """Buckets of exactly `size` tokens each, int64 [B, H, P, T]."""
    order = torch.rand(BATCH, HEADS, rounds, n_buckets * size).argsort(-1)
    return order // size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunks", [1, 3])
def test_attention_in_buckets_is_that_of_reformer_pytorch(
    chunks: int, rounds: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = shuffled_buckets(chunks * CHUNK, 2, rounds)
    length = buckets.shape[-1]
    q, v = (torch.randn(BATCH, HEADS, length, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    theirs = peer("reformer_pytorch").LSHAttention(
        bucket_size=CHUNK, n_hashes=rounds, causal=causal, attend_across_buckets=False, allow_duplicate_attention=False
    )
    offsets = torch.arange(rounds)[:, None] * (length // CHUNK)  # it numbers the buckets of all rounds
    monkeypatch.setattr(theirs, "hash_vectors", lambda *_, **__: (buckets + offsets).flatten(2).flatten(0, 1))
    expected = theirs(q.flatten(0, 1) * HEAD_DIM**0.5, v.flatten(0, 1))[0].view_as(v)
    monkeypatch.setattr("lineartime.baselines.reformer.reformer_buckets", lambda *_: buckets)
    layer = Reformer(HEADS * HEAD_DIM, n_heads=HEADS, n_buckets=2, chunk_size=CHUNK, causal=causal)
    out = layer.attend(q, q, v, None)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=0)  # it adds 1e-9 to the count of rounds
