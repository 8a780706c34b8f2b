"""Reformer's attention among given buckets against reformer-pytorch and the Reformer of transformers.

How they differ, and what is done about it here:
- Both cut all tokens, sorted by bucket, into chunks, so that a chunk may hold tokens of several buckets. Ours are cut inside
  each bucket, because the others show a causal token something of the future. The buckets here are whole numbers of chunks.
- reformer-pytorch divides scores by sqrt(h) once more than transformers and ours: its queries are multiplied by sqrt(h). Unless
  told otherwise it reads other buckets in its chunks, and counts a pair once for every round: it is told here.
- Transformers' reads its whole chunks, whatever the bucket, and counts a pair once for every round: here every bucket is one
  chunk, chunks do not look back, and there is one round. It adds 1e-6 under the root of the length of keys.
- The hash is random in all of them: buckets are given. Their maps have no biases: ours are zero here.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lineartime.baselines.reformer import Reformer, reformer_attention

CHUNK = 4
BATCH, HEADS, HEAD_DIM = 2, 3, 6


def shuffled_buckets(size: int, n_buckets: int, rounds: int) -> Tensor:
    """Buckets of exactly `size` tokens each, int64 [B, H, P, T]."""
    order = torch.rand(BATCH, HEADS, rounds, n_buckets * size).argsort(-1)
    return order // size


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_attention_in_buckets_is_that_of_reformer_pytorch(
    chunks: int, rounds: int, causal: bool, peer: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
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
    out = reformer_attention(q, v, buckets, n_buckets=2, chunk_size=CHUNK, causal=causal)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=0)  # it adds 1e-9 to the count of rounds


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n_buckets", [1, 4])
def test_a_layer_is_that_of_transformers(
    n_buckets: int,
    causal: bool,
    peer: Callable[[str], Any],
    randomized: Callable[[nn.Module], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    d_model, buckets = HEADS * HEAD_DIM, shuffled_buckets(CHUNK, n_buckets, 1)
    ours = randomized(Reformer(d_model, n_heads=HEADS, n_buckets=4, n_rounds=1, chunk_size=CHUNK, causal=causal, rope=False))
    nn.init.zeros_(ours.to_qkv.bias)
    nn.init.zeros_(ours.to_output.bias)
    monkeypatch.setattr("lineartime.baselines.reformer.reformer_buckets", lambda *_: buckets)
    config = peer("transformers.models.reformer.configuration_reformer").ReformerConfig(
        hidden_size=d_model,
        num_attention_heads=HEADS,
        attention_head_size=HEAD_DIM,
        lsh_attn_chunk_length=CHUNK,
        lsh_num_chunks_before=0,
        num_buckets=4,
        num_hashes=1,
        is_decoder=causal,
        lsh_attention_probs_dropout_prob=0.0,
    )
    theirs = peer("transformers.models.reformer.modeling_reformer").LSHSelfAttention(config).double()
    qk, v = ours.to_qkv.weight.chunk(2)
    theirs.load_state_dict({"query_key.weight": qk, "value.weight": v})
    x = torch.randn(BATCH, n_buckets * CHUNK, d_model, dtype=torch.float64)
    attended = theirs(ours.norm(x), buckets=buckets).hidden_states
    torch.testing.assert_close(ours(x), x + ours.to_output(attended), atol=1e-5, rtol=0)
