"""Sparse attention: the parallel and the streaming form against the definition. S = 4, so that several blocks stay cheap."""

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines import sparse
from lineartime.baselines.sparse import (
    Sparse,
    sparse_attention,
    sparse_attention_extend,
    sparse_attention_oracle,
)
from lineartime.ops import KVCache
from lineartime.ops.make_batch import stream_batch

STRIDE = 4
LENGTHS = [0, 1, 3, 4, 5, 8, 17]


def definition(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], *, stride: int, causal: bool) -> Tensor:
    """The oracle for every row, of so many tokens, and every head of it."""
    out = torch.zeros_like(v)
    for row, tokens in enumerate(lengths):
        for head in range(v.shape[1] if tokens else 0):
            heads = (x[row, head, :tokens] for x in (q, k, v))
            out[row, head, :tokens] = sparse_attention_oracle(*heads, stride=stride, causal=causal)
    return out


@every_pair(length=LENGTHS, causal=[False, True], stride=[1, STRIDE], padded=[False, True])
def test_values_and_gradients_are_those_of_the_definition(length: int, causal: bool, stride: int, padded: bool) -> None:
    lengths = [length, length // 2 if padded else length]
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    tokens = [torch.randn(2, 2, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs, direction = [x * real[:, None, :, None] for x in tokens], torch.randn(2, 2, length, 6, dtype=torch.float64)
    fast = sparse_attention(*inputs, stride=stride, causal=causal, real=real if padded else None) * real[:, None, :, None]
    exact = definition(*inputs, lengths, stride=stride, causal=causal)
    torch.testing.assert_close(fast, exact, atol=1e-10, rtol=0)
    if length:
        gradients = [torch.autograd.grad((out * direction).sum(), tokens, retain_graph=True) for out in (fast, exact)]
        for of_fast, of_exact in zip(*gradients, strict=True):
            torch.testing.assert_close(of_fast, of_exact, atol=1e-10, rtol=0)


def test_a_token_reads_its_window_and_every_fourth_token() -> None:
    zeros, values = torch.zeros(1, 1, 12, 12), torch.eye(12)[None, None]  # equal scores; each output shows who was read
    reads = sparse_attention(zeros, zeros, values, stride=STRIDE, causal=True)[0, 0] > 0
    assert reads[11].nonzero().flatten().tolist() == [3, 7, 8, 9, 10, 11]
    reads = sparse_attention(zeros, zeros, values, stride=STRIDE, causal=False)[0, 0] > 0
    assert reads[4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("gathered", [1, 12, 8192])
def test_streaming_is_the_causal_form_however_few_keys_are_gathered(monkeypatch: pytest.MonkeyPatch, gathered: int) -> None:
    monkeypatch.setattr(sparse, "GATHERED", gathered)
    q, k, v = (torch.randn(2, 2, 23, 6, dtype=torch.float64) for _ in range(3))
    state, pieces = KVCache(torch.zeros(2, dtype=torch.long), k[:, :, :0], v[:, :, :0]), []
    for new in (slice(0, 2), slice(2, 2), slice(2, 14), slice(14, 23)):
        parts = q[:, :, new], k[:, :, new], v[:, :, new]
        batch = stream_batch(state.position, (2, parts[0].shape[2]))
        piece, state = sparse_attention_extend(*parts, state, batch, stride=STRIDE)
        pieces.append(piece)
    whole = sparse_attention(q, k, v, stride=STRIDE, causal=True)
    torch.testing.assert_close(torch.cat(pieces, 2), whole, atol=1e-10, rtol=0)
    assert state.position.tolist() == [23, 23]


def test_a_stride_below_one_is_named() -> None:
    with pytest.raises(ValueError, match="stride is 0, but must be at least 1"):
        Sparse(16, n_heads=2, stride=0)
