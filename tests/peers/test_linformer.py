"""Linformer against the package linformer.

Its maps of queries, keys and values have no biases: ours are zero here. It may share keys and values, or have one head for
them, which the paper offers and we do not.
"""

import pytest
import torch
from tests.peers.packages import peer, randomized
from torch import nn

from lineartime.baselines.landmarks import Linformer


@pytest.mark.parametrize("length", [1, 9, 16])
def test_linformer_is_that_of_the_package(length: int) -> None:
    ours = randomized(Linformer(16, n_heads=2, n_landmarks=5, max_length=16, rope=False))
    nn.init.zeros_(ours.to_qkv.bias)
    theirs = peer("linformer").LinformerSelfAttention(16, 16, k=5, heads=2).double()
    q, k, v = ours.to_qkv.weight.chunk(3)
    theirs.load_state_dict(
        {
            "to_q.weight": q,
            "to_k.weight": k,
            "to_v.weight": v,
            "proj_k": ours.mix_keys.mT,
            "proj_v": ours.mix_values.mT,
            "to_out.weight": ours.to_output.weight,
            "to_out.bias": ours.to_output.bias,
        }
    )
    x = torch.randn(2, length, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), x + theirs(ours.norm(x)), atol=1e-10, rtol=0)
