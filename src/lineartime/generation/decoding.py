"""Continuing texts token by token, from the states of what was read.

Shapes: B texts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lineartime.generation.sampling import Sampling, Seen, draw, pick, uniform_numbers
from lineartime.layers.streams import tensors_of
from lineartime.models.backbone import BackboneStreams
from lineartime.models.language_model import CausalLM
from lineartime.models.streams import BackboneState, GroupedStreams
from lineartime.ops.backends import GPU_LOCK

Next = Callable[[Tensor], Tensor]
"""Reads one more token of each text, int64 [B], and returns the logits after them, [B, V]."""


def continuing(model: CausalLM, states: Sequence[BackboneState]) -> Next:
    """Continue texts token by token; a model that steps in place is recorded as one CUDA graph.

    Args:
        model: the model.
        states: of one or more texts each, as `prefill` returns them; they are not modified.
    """
    streams, device = model.join_streams(states), next(model.parameters()).device
    step: Callable[[Tensor], Tensor] = partial(model.step, streams=streams)
    if _can_record(model):
        step = recorded_step(model, streams)
    return lambda tokens: step(tokens.to(device)[:, None])[:, 0]


def drawing(
    model: CausalLM,
    states: Sequence[BackboneState],
    sampling: Sampling,
    generator: torch.Generator,
    seen: Seen | None = None,
) -> Callable[[Tensor], Tensor]:
    """Continue texts by the tokens that were drawn last, int64 [B], and draw the next ones.

    Where CUDA records the step, drawing is a part of the graph, and the next token waits for no copy of the last.

    Args:
        model, states: as for `continuing`.
        sampling: how to draw.
        generator: on the CPU.
        seen: the tokens of the texts, on the CPU, for a penalty of repetitions.
    """
    if not _can_record(model):
        read_next = continuing(model, states)
        return lambda tokens: draw(read_next(tokens), sampling, generator, seen)
    streams = model.join_streams(states)
    assert not isinstance(streams, GroupedStreams)
    tokens = torch.zeros_like(streams.position)
    uniform = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
    inputs, changed = (tokens, uniform), list(tensors_of(streams))
    if seen is not None:
        seen.mask = seen.mask.to(tokens.device)
        changed.append(seen.mask)
    step = recorded(partial(step_and_pick, model, streams, sampling, seen=seen), inputs, changed)
    return lambda tokens: step(tokens, uniform_numbers(len(tokens), generator))


def step_and_pick(
    model: CausalLM, streams: BackboneStreams, sampling: Sampling, tokens: Tensor, uniform: Tensor, seen: Seen | None = None
) -> Tensor:
    """Continue joined streams by a token each, int64 [B], and pick the next ones by numbers in [0, 1), [B] -> int64 [B]."""
    return pick(model.step(tokens[:, None], streams)[:, 0], sampling, uniform, seen)


def _can_record(model: CausalLM) -> bool:
    return next(model.parameters()).is_cuda and model.steps_in_place


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Cast weights anew under autocast: a graph would read a copy in its cache, which ends with the context."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def recorded_step(model: CausalLM, streams: BackboneStreams) -> Callable[[Tensor], Tensor]:
    """`model.step` in place as a CUDA graph."""
    assert not isinstance(streams, GroupedStreams)
    ids = torch.zeros_like(streams.position[:, None])
    return recorded(partial(model.step, streams=streams), (ids,), list(tensors_of(streams)))


def recorded(function: Callable[..., Tensor], inputs: Sequence[Tensor], changed: Sequence[Tensor]) -> Callable[..., Tensor]:
    """A function as a CUDA graph, which launches the hundreds of kernels of a token at once.

    Args:
        function: of tensors; the same launches at each call, and no copies to the host.
        inputs: the memory that it reads its arguments from.
        changed: what it changes in place; that stays as it is until the first call of the result.

    Returns:
        The function, of tensors on any device; the next call overwrites the tensor that it returns.
    """
    before = [tensor.clone() for tensor in changed]

    def undo() -> None:
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)

    # A process records one graph at a time, and must not wait for the whole device meanwhile.
    with GPU_LOCK, torch.cuda.device(inputs[0].device), _without_autocast_cache():
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # the graph must not record what the first calls set up
            for _ in range(3):
                function(*inputs)
                undo()  # each time: there may be no position after the next one
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # On a stream of this device and this graph: by default, all graphs share one stream, on the device of the first, and
        # the workspaces of its matrix products.
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            out = function(*inputs)

    return _Recorded(graph, inputs, out, memory=(function, changed))


class _Recorded:
    """A recorded function. It keeps the memory alive that its graph reads and writes, which the graph itself does not."""

    def __init__(self, graph: "torch.cuda.CUDAGraph", inputs: Sequence[Tensor], out: Tensor, memory: object) -> None:
        self._graph, self._inputs, self._out, self._memory = graph, inputs, out, memory

    def __call__(self, *given: Tensor) -> Tensor:
        for tensor, value in zip(self._inputs, given, strict=True):
            tensor.copy_(value, non_blocking=True)
        self._graph.replay()
        return self._out
