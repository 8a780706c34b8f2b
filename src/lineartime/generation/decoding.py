"""Continuing texts token by token, from the states of what was read.

Shapes: B texts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lineartime.generation.sampling import Sampling, draw, pick, uniform_numbers
from lineartime.models.backbone import ModelState
from lineartime.models.decoder import MAX_STREAMS
from lineartime.models.language_model import CausalLM, read_token
from lineartime.ops.backends import GPU_LOCK


def continuing(model: CausalLM, state: ModelState) -> Callable[[Tensor], Tensor]:
    """Continue texts by one more token each, int64 [B] -> logits [B, V]. The state is consumed.

    With a state of constant size on a GPU, this is one CUDA graph.
    """
    device = next(model.parameters()).device
    if _can_record(model):
        changed, tokens = list(state.tensors()), torch.zeros_like(state.position)
        return recorded(lambda drawn: read_token(model, drawn, state)[0], (tokens,), changed)
    decoder = model.compile_for_decoding()

    def read(tokens: Tensor) -> Tensor:
        nonlocal state
        logits, state = decoder.extend(tokens.to(device), state)
        return logits

    return read


def drawing(
    model: CausalLM, state: ModelState, sampling: Sampling, generator: torch.Generator, seen: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """Continue texts by the tokens that were drawn last, int64 [B], and draw the next ones.

    Where one function reads a token, on a CPU or as a CUDA graph, it also draws the next one.

    Args:
        model: the model.
        state: of the texts; it is consumed.
        sampling: how to draw.
        generator: on the CPU.
        seen: the tokens of the texts, bool [B, V], on the CPU, for a penalty of repetitions.
    """
    if _can_record(model):
        tokens = torch.zeros_like(state.position)
        uniform = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.device)
        seen = None if seen is None else seen.to(tokens.device)
        changed = [*state.tensors(), *(() if seen is None else (seen,))]
        step = recorded(partial(step_and_pick, model, state, sampling, seen=seen), (tokens, uniform), changed)
        return lambda tokens: step(tokens, uniform_numbers(len(tokens), generator))
    native = model.compile_for_decoding().native
    if native is None or seen is not None or len(state) > MAX_STREAMS:
        read_next = continuing(model, state)
        return lambda tokens: draw(read_next(tokens), sampling, generator, seen)
    draw_next, count = native.draw, len(state)
    how = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    return lambda tokens: draw_next(tokens, uniform_numbers(count, generator), *how, state)


def step_and_pick(
    model: CausalLM, state: ModelState, sampling: Sampling, tokens: Tensor, uniform: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Continue streams by a token each, int64 [B], and pick the next ones by numbers in [0, 1), [B] -> int64 [B].

    A state of constant size is updated in place.
    """
    return pick(read_token(model, tokens, state)[0], sampling, uniform, seen)


def _can_record(model: CausalLM) -> bool:
    return next(model.parameters()).is_cuda and model.constant_state


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

    return partial(_replay, graph, inputs, out, (function, changed))


def _replay(graph: "torch.cuda.CUDAGraph", inputs: Sequence[Tensor], out: Tensor, memory: object, *given: Tensor) -> Tensor:
    """Run a graph on new inputs. It reads and writes `memory`, which it does not keep alive itself."""
    for tensor, value in zip(inputs, given, strict=True):
        tensor.copy_(value, non_blocking=True)
    graph.replay()
    return out
