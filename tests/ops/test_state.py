"""What all states of streams can do, and the memory of a cache, which grows by doubling."""

from dataclasses import dataclass

import torch
from tests.ops.cases import options_of, packing_of
from torch import Tensor

from lineartime.ops.mixed_chunk import attend_cached
from lineartime.ops.state import MIN_ROOM, KVCache, State, writable


@dataclass(eq=False)
class Cache(State):
    """Places of a cache [B, room, 1], and an upper bound of the positions."""

    position: Tensor
    places: Tensor
    longest: int = 0


@dataclass(eq=False)
class Model(State):
    """A state of states."""

    position: Tensor
    layers: tuple[State | None, ...]


def model_state(streams: int, room: int) -> Model:
    position = torch.arange(streams)
    return Model(position, (Cache(position.clone(), torch.randn(streams, room, 1), room), None))


def cache_of(state: Model) -> Cache:
    (cache, nothing) = state.layers
    assert isinstance(cache, Cache)
    assert nothing is None
    return cache


def test_clone_has_memory_of_its_own() -> None:
    state = model_state(2, 3)
    copy = state.clone()
    for one, other in zip(state.tensors(), copy.tensors(), strict=True):
        assert torch.equal(one, other)
        other += 1
        assert not torch.equal(one, other)
    assert cache_of(copy).longest == 3
    assert state.nbytes == copy.nbytes == 2 * (8 + 8 + 3 * 4)


def test_shorter_memory_grows_where_states_are_concatenated() -> None:
    states = [model_state(2, 3), model_state(0, 9), model_state(1, 5)]
    joined = State.concatenate(states)
    assert len(joined) == 3
    assert joined.position.tolist() == [0, 1, 0]
    places = cache_of(joined).places
    assert places.shape == (3, 9, 1)
    assert cache_of(joined).longest == 9
    for start, one in ((0, states[0]), (2, states[2])):
        own = cache_of(one).places
        assert torch.equal(places[start : start + len(one), : own.shape[1]], own)
        assert not places[start : start + len(one), own.shape[1] :].any()


def test_copies_made_in_inference_mode_can_be_updated_outside() -> None:
    with torch.inference_mode():
        state = model_state(2, 3)
        copies = [state.clone(), state.take(torch.tensor([1])), State.concatenate([state, model_state(1, 5)])]
    for copy in copies:
        for tensor in copy.tensors():
            tensor += 1
    position = state.position
    assert writable(position) is not position
    with torch.inference_mode():
        assert writable(position) is position


def test_gradients_flow_through_taken_and_concatenated_states() -> None:
    places = torch.randn(2, 3, 1, requires_grad=True)
    state = Cache(torch.zeros(2, dtype=torch.long), places, 3)
    joined = State.concatenate([state.take(torch.tensor([1, 1])), state])
    (gradient,) = torch.autograd.grad(joined.places.sum(), places)
    assert gradient.flatten(1).tolist() == [[1.0] * 3, [3.0] * 3]


def empty_cache() -> KVCache:
    return KVCache(torch.zeros(2, dtype=torch.long), torch.zeros(2, 0, 3), torch.zeros(2, 0, 5))


@torch.no_grad()
def test_memory_of_a_cache_is_allocated_only_when_it_has_doubled() -> None:
    k, v = torch.randn(2, 5 * MIN_ROOM, 3), torch.randn(2, 5 * MIN_ROOM, 5)
    cache, memory = empty_cache(), set()
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

    before, cache = read(empty_cache(), slice(2))
    after, _ = read(cache, slice(2, 4))
    (gradient,) = torch.autograd.grad(before.sum() + after.sum(), q)
    at_once, _ = read(empty_cache(), slice(4))
    torch.testing.assert_close(gradient, torch.autograd.grad(at_once.sum(), q)[0])
