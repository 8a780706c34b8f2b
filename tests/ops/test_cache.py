"""The cache of keys and values: it grows in place, and every state that was handed out stays as it is."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # makes ForkingPickler share the memory of tensors
from torch import Tensor

from lineartime.ops import KVCache, quadratic_attention_extend
from lineartime.ops.cache import MIN_ROOM


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 3, generator=generator), torch.randn(2, count, 5, generator=generator)


def empty() -> KVCache:
    k, v = tokens(0)
    return KVCache(k, v)


@torch.no_grad()
def test_token_by_token_memory_is_allocated_only_when_it_has_doubled() -> None:
    k, v = tokens(5 * MIN_ROOM)
    cache, places = empty(), set()
    for place in range(k.shape[1]):
        cache = cache.append(k[:, place : place + 1], v[:, place : place + 1])
        places.add(cache.k.untyped_storage().data_ptr())
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, v)
    assert len(places) <= 4  # room for 64, 128, 256 and 512 tokens
    sent = pickle.loads(pickle.dumps(cache))
    assert torch.equal(sent.k, k)
    assert sent.k.untyped_storage().nbytes() == k.nbytes  # the free room was never written


@torch.no_grad()
def test_a_cache_that_is_continued_twice_gives_each_its_own_tokens() -> None:
    first = empty().append(*tokens(4))
    one, other = first.append(*tokens(2, 1)), first.append(*tokens(2, 2))
    assert torch.equal(first.k, tokens(4)[0])
    assert torch.equal(one.k[:, 4:], tokens(2, 1)[0])
    assert torch.equal(other.k[:, 4:], tokens(2, 2)[0])
    assert torch.equal(one.append(*tokens(1, 3)).v[:, :6], one.v)
    assert torch.equal(other.append(*tokens(1, 4)).v[:, :6], other.v)
    assert torch.equal(one.append(*tokens(1, 5)).v[:, 4:6], tokens(2, 1)[1])


@torch.no_grad()
def test_threads_that_continue_one_cache_do_not_write_over_each_other() -> None:
    for _ in range(20):
        first = empty().append(*tokens(4))
        with ThreadPoolExecutor(8) as pool:
            grown = list(pool.map(lambda seed, state=first: state.append(*tokens(3, seed)), range(8)))
        for seed, cache in enumerate(grown):
            assert torch.equal(cache.k[:, 4:], tokens(3, seed)[0])


@torch.no_grad()
def test_a_copied_cache_is_one_of_its_own() -> None:
    first = empty().append(*tokens(4))
    copied = copy.deepcopy(first)
    copied.append(*tokens(2, 1))
    grown = first.append(*tokens(2, 2))
    again = copied.append(*tokens(2, 3))
    assert torch.equal(grown.k[:, 4:], tokens(2, 2)[0])
    assert torch.equal(again.k[:, 4:], tokens(2, 3)[0])


@torch.no_grad()
def test_a_cache_that_is_sent_to_two_processes_gives_each_its_own_tokens() -> None:
    first = empty().append(*tokens(4))
    one, other = (pickle.loads(ForkingPickler.dumps(first)) for _ in range(2))
    grown, also = one.append(*tokens(2, 1)), other.append(*tokens(2, 2))
    for cache, seed in ((grown, 1), (also, 2)):
        assert torch.equal(cache.k, torch.cat([tokens(4)[0], tokens(2, seed)[0]], 1))


def test_a_cache_made_in_inference_mode_can_be_continued_outside() -> None:
    with torch.inference_mode():
        first = empty().append(*tokens(2))
    with torch.no_grad():
        grown = first.append(*tokens(1, 1))
    assert torch.equal(grown.k, torch.cat([tokens(2)[0], tokens(1, 1)[0]], 1))


def test_gradients_flow_through_a_cache() -> None:
    k, v = (x.double().requires_grad_() for x in tokens(6))

    def grown(k: Tensor, v: Tensor) -> Tensor:
        cache = KVCache(k[:, :2], v[:, :2]).append(k[:, 2:5], v[:, 2:5]).append(k[:, 5:], v[:, 5:])
        return cache.k.sum() + (cache.v**2).sum()

    assert torch.autograd.gradcheck(grown, (k, v))


def test_a_cache_without_gradients_keeps_what_the_gradients_of_queries_need() -> None:
    q = torch.randn(2, 4, 3, requires_grad=True)
    k, v = tokens(4)
    before, state = quadratic_attention_extend(q[:, :2], k[:, :2], v[:, :2], empty())
    after, _ = quadratic_attention_extend(q[:, 2:], k[:, 2:], v[:, 2:], state)
    (gradient,) = torch.autograd.grad(before.sum() + after.sum(), q)
    at_once, _ = quadratic_attention_extend(q, k, v, empty())
    torch.testing.assert_close(gradient, torch.autograd.grad(at_once.sum(), q)[0])


@pytest.mark.parametrize("count", [1, MIN_ROOM + 1])
def test_a_cache_holds_what_two_pieces_hold(count: int) -> None:
    k, v = tokens(count + 7)
    with torch.no_grad():
        cache = empty().append(k[:, :count], v[:, :count]).append(k[:, count:], v[:, count:])
    assert cache.position == count + 7
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, v)
