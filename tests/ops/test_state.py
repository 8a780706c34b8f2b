"""What all states of streams can do, and the memory of a cache, which grows by doubling."""

import torch
import torch.nn.functional as F
from tests.ops.cases import options_of, packing_of
from torch import Tensor

from lineartime.ops.mixed_chunk import attend_cached
from lineartime.ops.state import MIN_ROOM, KVCache, State


def cache_of(streams: int = 2, room: int = 0) -> KVCache:
    return KVCache(
        torch.zeros(streams, dtype=torch.long), torch.randn(streams, room, 3), torch.randn(streams, room, 5), longest=room
    )


def test_shorter_memory_grows_where_states_are_taken_and_concatenated_and_gradients_flow() -> None:
    caches = [cache_of(2, 3), cache_of(0, 9), cache_of(1, 5)]
    places = caches[0].k.requires_grad_()
    joined = State.concatenate([caches[0].take(torch.tensor([1, 1])), *caches])
    assert (len(joined), joined.longest, joined.nbytes) == (5, 9, 5 * (8 + 9 * (3 + 5) * 4))
    assert torch.equal(
        joined.k, torch.cat([F.pad(k, (0, 0, 0, 9 - k.shape[1])) for k in (places[[1, 1]], *(c.k for c in caches))])
    )
    (gradient,) = torch.autograd.grad(joined.k.sum(), places)
    assert gradient[:, :, 0].tolist() == [[1.0] * 3, [3.0] * 3]


def test_copies_made_in_inference_mode_can_be_updated_outside() -> None:
    with torch.inference_mode():
        state = cache_of(2, 3)
        copies = [state.clone(), state.take(torch.tensor([1])), State.concatenate([state, cache_of(1, 5)])]
    for copy in copies:
        for tensor in copy.tensors():
            tensor += 1


@torch.no_grad()
def test_memory_of_a_cache_is_allocated_only_when_it_has_doubled() -> None:
    k, v = torch.randn(2, 5 * MIN_ROOM, 3), torch.randn(2, 5 * MIN_ROOM, 5)
    cache, memory = cache_of(), set()
    for place in range(k.shape[1]):
        here, packing = slice(place, place + 1), packing_of(2, 1, position=cache.position)
        cache, keys, values, last = cache.append(k[:, here], v[:, here], packing)
        memory.add(cache.k.untyped_storage().data_ptr())
        assert torch.equal(keys, k[:, : place + 1])
        assert torch.equal(values, v[:, : place + 1])
        assert last.tolist() == [place]
    assert len(memory) <= 4  # room for 64, 128, 256 and 512 tokens


def test_cache_without_gradients_keeps_what_the_gradients_of_queries_need() -> None:
    q, k, v = torch.randn(2, 4, 3, requires_grad=True), torch.randn(2, 4, 3), torch.randn(2, 4, 5)

    def read(cache: KVCache, places: slice) -> tuple[Tensor, KVCache]:
        packing = packing_of(2, len(range(4)[places]), position=cache.position)
        own = (x[:, places].flatten(0, 1) for x in (q, k, v))
        return attend_cached(*own, packing, options_of(None, True, d_qk=4), cache)

    before, cache = read(cache_of(), slice(2))
    after, _ = read(cache, slice(2, 4))
    (gradient,) = torch.autograd.grad(before.sum() + after.sum(), q)
    at_once, _ = read(cache_of(), slice(4))
    torch.testing.assert_close(gradient, torch.autograd.grad(at_once.sum(), q)[0])
