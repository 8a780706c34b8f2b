"""Reformer: the leak that the published form has, and the hash."""

import pytest
import torch

from lineartime.baselines import reformer
from lineartime.baselines.reformer import Reformer, reformer_buckets


def published_reads(buckets: list[int], chunk_size: int) -> list[set[int]]:
    """Which tokens each token reads where chunks are cut from all tokens sorted by bucket, with a causal mask after that."""
    order = sorted(range(len(buckets)), key=lambda token: (buckets[token], token))
    chunk = {token: place // chunk_size for place, token in enumerate(order)}
    return [{j for j in range(i) if chunk[j] in (chunk[i] - 1, chunk[i])} for i in range(len(buckets))]


def our_reads(buckets: list[int], chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The same for ours, seen in the weights that the layer's attention gives to one-hot values."""
    length = len(buckets)
    monkeypatch.setattr(reformer, "reformer_buckets", lambda *_: torch.tensor(buckets)[None, None, None])
    layer = Reformer(2, n_heads=1, n_buckets=2, chunk_size=chunk_size, causal=True)
    out = layer.attend(*torch.ones(2, 1, 1, length, 2), torch.eye(length)[None, None], None)
    return [set(row.nonzero().flatten().tolist()) - {i} for i, row in enumerate(out[0, 0])]


def test_later_token_moves_the_chunks_of_the_published_form_but_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    later_in_last_bucket, later_in_first_bucket = [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]
    assert published_reads(later_in_last_bucket, 2)[3] == {0, 1, 2}
    assert published_reads(later_in_first_bucket, 2)[3] == {1, 2}  # token 3 has learnt the bucket of token 4
    for buckets in (later_in_last_bucket, later_in_first_bucket):
        assert our_reads(buckets, 2, monkeypatch)[:4] == [set(), {0}, {0, 1}, {0, 1, 2}]


def test_bucket_depends_on_the_direction_of_a_vector_alone() -> None:
    x, directions = torch.randn(1, 2, 50, 6), torch.randn(2, 3, 6, 2)
    buckets = reformer_buckets(x, directions)
    assert buckets.shape == (1, 2, 3, 50)
    assert set(buckets.flatten().tolist()) == set(range(4))
    assert torch.equal(reformer_buckets(8 * x, directions), buckets)
    assert torch.equal(reformer_buckets(-x, directions), (buckets + 2) % 4)


def test_tokens_are_hashed_before_they_are_rotated() -> None:
    layer = Reformer(16, n_heads=2, n_buckets=8, causal=True)
    _, state = layer.extend(torch.randn(1, 1, 16).expand(1, 30, 16), layer.init_state(1))
    assert torch.equal(state.buckets, state.buckets[..., :1].expand_as(state.buckets))


def test_query_of_zero_has_a_finite_gradient() -> None:
    q = torch.zeros(1, 1, 3, 6, requires_grad=True)
    out = Reformer(6, n_heads=1, chunk_size=4).attend(q, torch.zeros(1, 1, 3, 6), torch.randn(1, 1, 3, 6), None)
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    assert gradient.isfinite().all()
