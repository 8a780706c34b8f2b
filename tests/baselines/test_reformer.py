"""Reformer: the parallel and the streaming form against the definition, and the leak that the published form has. C = 4."""

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines import reformer
from lineartime.baselines.reformer import (
    Reformer,
    ReformerState,
    reformer_attention,
    reformer_attention_extend,
    reformer_attention_oracle,
    reformer_buckets,
)

CHUNK, BUCKETS, ROUNDS = 4, 4, 3
LENGTHS = [0, 1, 3, 4, 5, 17, 40]


def definition(q: Tensor, v: Tensor, buckets: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """The oracle for every row, of so many tokens, and every head of it."""
    out = torch.zeros_like(v)
    for row, tokens in enumerate(lengths):
        for head in range(v.shape[1] if tokens else 0):
            heads = q[row, head, :tokens], v[row, head, :tokens], buckets[row, head, :, :tokens]
            out[row, head, :tokens] = reformer_attention_oracle(*heads, chunk_size=CHUNK, causal=causal)
    return out


def random_buckets(length: int, used: int) -> Tensor:
    return torch.randint(used, (2, 2, ROUNDS, length))


@every_pair(length=LENGTHS, causal=[False, True], used=[1, BUCKETS], padded=[False, True])
def test_values_and_gradients_are_those_of_the_definition(length: int, causal: bool, used: int, padded: bool) -> None:
    lengths = [length, length // 2 if padded else length]
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    tokens = [torch.randn(2, 2, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    direction, buckets = torch.randn(2, 2, length, 6, dtype=torch.float64), random_buckets(length, used)
    q, v = (x * real[:, None, :, None] for x in tokens)
    fast = reformer_attention(q, v, buckets, n_buckets=BUCKETS, chunk_size=CHUNK, causal=causal, real=real if padded else None)
    fast, exact = fast * real[:, None, :, None], definition(q, v, buckets, lengths, causal)
    torch.testing.assert_close(fast, exact, atol=1e-10, rtol=0)
    if length:
        options = {"retain_graph": True, "materialize_grads": True}  # a token alone asks its query nothing
        gradients = [torch.autograd.grad((out * direction).sum(), tokens, **options) for out in (fast, exact)]
        for of_fast, of_exact in zip(*gradients, strict=True):
            torch.testing.assert_close(of_fast, of_exact, atol=1e-10, rtol=0)


@every_pair(compared=[1, 5 * 23, 2**20], used=[1, BUCKETS])
def test_streaming_is_the_causal_form_however_few_are_compared(
    monkeypatch: pytest.MonkeyPatch, compared: int, used: int
) -> None:
    monkeypatch.setattr(reformer, "COMPARED", compared)
    q, v = (torch.randn(2, 2, 23, 6, dtype=torch.float64) for _ in range(2))
    buckets = random_buckets(23, used)
    none = q[:, :, :0], v[:, :, :0], buckets[..., :0], buckets[..., :0]
    state, pieces = ReformerState(torch.zeros(2, dtype=torch.long), *none), []
    for new in (slice(0, 2), slice(2, 2), slice(2, 14), slice(14, 23)):
        parts = q[:, :, new], v[:, :, new], buckets[..., new]
        piece, state = reformer_attention_extend(*parts, state, new.start, chunk_size=CHUNK)
        pieces.append(piece)
    whole = reformer_attention(q, v, buckets, n_buckets=BUCKETS, chunk_size=CHUNK, causal=True)
    torch.testing.assert_close(torch.cat(pieces, 2), whole, atol=1e-10, rtol=0)
    assert state.position.tolist() == [23, 23]


# The leak -------------------------------------------------------------------------------------------------------------


def published_reads(buckets: list[int], chunk_size: int) -> list[set[int]]:
    """Which tokens each token reads where chunks are cut from all tokens sorted by bucket, with a causal mask after that."""
    order = sorted(range(len(buckets)), key=lambda token: (buckets[token], token))
    chunk = {token: place // chunk_size for place, token in enumerate(order)}
    return [{j for j in range(i) if chunk[j] in (chunk[i] - 1, chunk[i])} for i in range(len(buckets))]


def our_reads(buckets: list[int], chunk_size: int) -> list[set[int]]:
    """The same for ours, seen in the weights that the layer's attention gives to one-hot values."""
    length = len(buckets)
    q, v = torch.ones(1, 1, length, 2), torch.eye(length)[None, None]
    out = reformer_attention(q, v, torch.tensor(buckets)[None, None, None], n_buckets=2, chunk_size=chunk_size, causal=True)
    return [set(row.nonzero().flatten().tolist()) - {i} for i, row in enumerate(out[0, 0])]


def test_a_later_token_moves_the_chunks_of_the_published_form_but_not_ours() -> None:
    later_in_last_bucket, later_in_first_bucket = [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]
    assert published_reads(later_in_last_bucket, 2)[3] == {0, 1, 2}
    assert published_reads(later_in_first_bucket, 2)[3] == {1, 2}  # token 3 has learnt the bucket of token 4
    assert our_reads(later_in_last_bucket, 2)[:4] == our_reads(later_in_first_bucket, 2)[:4] == [set(), {0}, {0, 1}, {0, 1, 2}]


# The hash and the layer -----------------------------------------------------------------------------------------------


def test_a_bucket_depends_on_the_direction_of_a_vector_alone() -> None:
    x, directions = torch.randn(1, 2, 50, 6), torch.randn(2, ROUNDS, 6, BUCKETS // 2)
    buckets = reformer_buckets(x, directions)
    assert buckets.shape == (1, 2, ROUNDS, 50)
    assert set(buckets.flatten().tolist()) == set(range(BUCKETS))
    assert torch.equal(reformer_buckets(8 * x, directions), buckets)
    assert torch.equal(reformer_buckets(-x, directions), (buckets + BUCKETS // 2) % BUCKETS)


def test_tokens_are_hashed_before_they_are_rotated() -> None:
    layer = Reformer(16, n_heads=2, n_buckets=8, causal=True)
    _, state = layer.extend(torch.randn(1, 1, 16).expand(1, 30, 16), layer.init_state(1))
    assert torch.equal(state.buckets, state.buckets[..., :1].expand_as(state.buckets))


def test_a_token_reads_itself_only_if_there_is_nothing_else() -> None:
    q, v = torch.randn(1, 1, 2, 6), torch.randn(1, 1, 2, 6)
    together, apart = torch.tensor([[[[0, 0]]]]), torch.tensor([[[[0, 1]]]])
    out = reformer_attention(q, v, together, n_buckets=2, chunk_size=CHUNK, causal=True)
    assert torch.equal(out[0, 0], v[0, 0, [0, 0]])
    assert torch.equal(reformer_attention(q, v, apart, n_buckets=2, chunk_size=CHUNK, causal=True), v)


def test_a_query_of_zero_has_a_finite_gradient() -> None:
    q = torch.zeros(1, 1, 3, 6, requires_grad=True)
    out = reformer_attention(
        q, torch.randn(1, 1, 3, 6), torch.zeros(1, 1, 1, 3).long(), n_buckets=2, chunk_size=4, causal=False
    )
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    assert gradient.isfinite().all()


def test_the_hash_is_saved_with_the_weights_but_not_learned() -> None:
    layer, other, x = Reformer(16, n_heads=2), Reformer(16, n_heads=2), torch.randn(1, 9, 16)
    assert not torch.equal(layer.directions, other.directions)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    assert "directions" not in dict(layer.named_parameters())


def test_every_parameter_is_learned() -> None:
    layer = Reformer(16, n_heads=2)
    layer(torch.randn(1, 9, 16)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())
    assert layer.to_qkv.weight.shape == (32, 16)
