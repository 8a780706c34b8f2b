"""Attention near a token against the package local-attention, whose windows are our chunks; functions of queries, keys, values.

It has softmax alone: our quadratic parts take it as their activation, without relative bias. Bidirectional, it reads the zeros
that it appends to the last window unless a mask forbids it: here one does.
"""

from typing import Any

import pytest
import torch
from tests.peers.packages import peer
from torch import Tensor

from lineartime.baselines.flash_variants import FLASHOverlapping
from lineartime.baselines.sparse import Sparse
from lineartime.ops import MixedChunkOptions, Scales, attend, describe
from lineartime.ops.mixed_chunk import reciprocal

WINDOW = 4


def tokens(length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, length, 8, dtype=torch.float64) for _ in range(3))
    return q, k, v


def near(q: Tensor, k: Tensor, v: Tensor, causal: bool, chunks: int, **options: Any) -> Tensor:
    """Theirs, reading so many chunks on each side that it may look to."""
    theirs = peer("local_attention").LocalAttention(
        WINDOW,
        causal=causal,
        look_backward=chunks,
        look_forward=0 if causal else chunks,
        autopad=True,
        use_rotary_pos_emb=False,
        **options,
    )
    out: Tensor = theirs(q, k, v, mask=torch.ones(q.shape[:2], dtype=torch.bool))
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [8, 18])
def test_quadratic_part_of_flash_with_softmax_is_local_attention(length: int, causal: bool) -> None:
    q, k, v = tokens(length)
    packing = describe(v.shape, device=v.device)
    options = MixedChunkOptions(WINDOW, causal, Scales(q.shape[-1] ** -0.5, reciprocal, reciprocal), "softmax")
    out, _ = attend(packing.pack(q), packing.pack(k), None, None, packing.pack(v), packing, options)
    torch.testing.assert_close(packing.unpack(out), near(q, k, v, causal, 0), atol=1e-10, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [8, 18])
def test_overlapping_chunks_with_softmax_are_local_attention_that_looks_around(length: int, causal: bool) -> None:
    q, k, v = tokens(length)
    layer = FLASHOverlapping(8, d_qk=8, chunk_size=WINDOW, causal=causal, activation="softmax", relative_bias=False)
    packing = describe(v.shape, device=v.device)
    near_ones, _ = layer.attend_near(*map(packing.pack, (q, k, v)), packing, None)
    out = packing.unpack(near_ones)
    torch.testing.assert_close(out, near(q, k, v, causal, 1), atol=1e-10, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_sparse_attention_is_an_exact_window_until_the_second_stride(causal: bool) -> None:
    q, k, v = tokens(2 * WINDOW)  # up to here, near tokens and multiples of the stride are all at distances 0 to 4
    out = Sparse(8, n_heads=1, stride=WINDOW, causal=causal).attend(q[:, None], k[:, None], v[:, None], None)[:, 0]
    torch.testing.assert_close(out, near(q, k, v, causal, 1, exact_windowsize=True), atol=1e-10, rtol=0)
