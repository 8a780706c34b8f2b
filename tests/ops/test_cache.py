"""The cache of keys and values: streams at any positions, in memory that grows by doubling."""

import pytest
import torch
from tests.ops.cases import options_of, packing_of
from torch import Tensor

from lineartime.ops import KVCache
from lineartime.ops.mixed_chunk import attend_cached
from lineartime.ops.packing import Packing
from lineartime.ops.state import MIN_ROOM, State


def tokens(count: int, seed: int = 0, heads: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *heads, count, 3, generator=generator), torch.randn(2, *heads, count, 5, generator=generator)


def empty(heads: tuple[int, ...] = ()) -> KVCache:
    return KVCache(torch.zeros(2, dtype=torch.long), *tokens(0, heads=heads))


def new(cache: KVCache, count: int, counts: list[int] | None = None) -> Packing:
    """`count` tokens of each stream, of which the first `counts` are real."""
    mask = None if counts is None else torch.arange(count) < torch.tensor(counts)[:, None]
    return packing_of(2, count, position=cache.position, mask=mask)


def grown(cache: KVCache, k: Tensor, v: Tensor) -> KVCache:
    return cache.append(k, v, new(cache, k.shape[-2]))[0]


@torch.no_grad()
def test_token_by_token_memory_is_allocated_only_when_it_has_doubled() -> None:
    k, v = tokens(5 * MIN_ROOM)
    cache, memory = empty(), set()
    for place in range(k.shape[1]):
        here = slice(place, place + 1)
        cache, keys, values, last = cache.append(k[:, here], v[:, here], new(cache, 1))
        memory.add(cache.k.untyped_storage().data_ptr())
        assert torch.equal(keys, k[:, : place + 1])
        assert torch.equal(values, v[:, : place + 1])
        assert last.tolist() == [place]
    assert len(memory) <= 4  # room for 64, 128, 256 and 512 tokens


@pytest.mark.parametrize(("gradients", "heads"), [(False, ()), (True, (2,))])
def test_tokens_follow_those_of_their_stream_at_any_positions(gradients: bool, heads: tuple[int, ...]) -> None:
    pieces = [(3, [3, 1]), (1, [0, 1]), (2, None), (1, None), (0, None), (MIN_ROOM, [2, MIN_ROOM]), (4, [0, 0]), (1, None)]
    cache, read = empty(heads), [[torch.zeros(*heads, 0, 3)] for _ in range(2)]
    with torch.set_grad_enabled(gradients):
        for seed, (size, counts) in enumerate(pieces):
            before = cache.position.clone()
            k, v = tokens(size, seed, heads)
            cache, keys, values, last = cache.append(k, v, new(cache, size, counts))
            for row, count in enumerate(counts or [size] * 2):
                read[row].append(k[row, ..., :count, :])
                whole = torch.cat(read[row], -2)
                assert torch.equal(keys[row, ..., : whole.shape[-2], :], whole)
                assert torch.equal(last.expand(2, size)[row, :count], before[row] + torch.arange(count))
            assert keys.isfinite().all()
            assert values.isfinite().all()
    assert cache.position.tolist() == [sum(part.shape[-2] for part in parts) for parts in read]


@torch.no_grad()
def test_clone_and_taken_and_concatenated_streams_have_memory_of_their_own() -> None:
    first = grown(empty(), *tokens(4))
    branches = [first.clone(), first.take(torch.tensor([0, 1])), State.concatenate([first]), first]
    continued = [grown(branch, *tokens(2, seed)) for seed, branch in enumerate(branches)]
    for seed, cache in enumerate(continued):
        assert torch.equal(cache.k[:, :6], torch.cat([tokens(4)[0], tokens(2, seed)[0]], 1))


def test_gradients_flow_through_a_cache() -> None:
    k, v = (x.double().requires_grad_() for x in tokens(6))

    def weighted(k: Tensor, v: Tensor) -> Tensor:
        cache = KVCache(torch.full((2,), 2), k[:, :2], v[:, :2], 2)
        cache, *_ = cache.append(k[:, 2:5], v[:, 2:5], new(cache, 3, [3, 1]))
        cache, keys, values, _ = cache.append(k[:, 5:], v[:, 5:], new(cache, 1))
        return (keys * torch.arange(keys.numel()).view_as(keys)).sum() + (values**2).sum()

    assert torch.autograd.gradcheck(weighted, (k, v))


def test_cache_without_gradients_keeps_what_the_gradients_of_queries_need() -> None:
    q, (k, v), options = torch.randn(2, 4, 3, requires_grad=True), tokens(4), options_of(None, True, d_qk=4)

    def read(cache: KVCache, places: slice) -> tuple[Tensor, KVCache]:
        packing = new(cache, len(range(4)[places]))
        return attend_cached(*(x[:, places].flatten(0, 1) for x in (q, k, v)), packing, options, cache)

    before, cache = read(empty(), slice(2))
    after, _ = read(cache, slice(2, 4))
    (gradient,) = torch.autograd.grad(before.sum() + after.sum(), q)
    at_once, _ = read(empty(), slice(4))
    torch.testing.assert_close(gradient, torch.autograd.grad(at_once.sum(), q)[0])
