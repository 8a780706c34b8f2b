"""Reading prompts, and continuing what was read token by token.

Shapes: B texts, N tokens of a prompt, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lineartime.layers.streams import tensors_of
from lineartime.models.backbone import BackboneState, JoinedStates
from lineartime.models.grouped import GroupedStreams
from lineartime.models.heads import CausalLM

PREFILL = 1024
"""Tokens of a prompt that a causal model reads at a time."""

Next = Callable[[Tensor], Tensor]
"""Reads one more token of each text, int64 [B], and returns the logits after them, [B, V]."""


def read(model: CausalLM, ids: Tensor) -> tuple[Tensor, BackboneState]:
    """Read the beginning of streams, ids [B, N]: the last logits [B, V], and the state.

    A model of task "prefix-lm" reads them as a prefix, all at once, and others `PREFILL` tokens at a time.
    """
    if model.config.task == "prefix-lm":
        hidden, state = model.backbone.read_prefix(ids)
        return model.logits(hidden[:, -1]), state
    state = model.init_state(ids.shape[0])
    for piece in ids.split(PREFILL, dim=1):
        hidden, state = model.backbone.extend(piece, state)
    return model.logits(hidden[:, -1]), state


def prefill(model: CausalLM, prompt: Sequence[int]) -> tuple[Tensor, BackboneState]:
    """Read a prompt: the logits [V] after its last token, and the state."""
    logits, state = read(model, torch.tensor([prompt], device=next(model.parameters()).device))
    return logits[0], state


def continuing(model: CausalLM, states: Sequence[BackboneState]) -> Next:
    """Continue texts token by token; where that happens in place, CUDA records it as one graph.

    Args:
        model: the model.
        states: of one or more texts each, as `prefill` returns them; they stay as they are.
    """
    streams, device = model.join_streams(states), next(model.parameters()).device
    step: Callable[[Tensor], Tensor] = partial(model.step, streams=streams)
    if device.type == "cuda" and model.steps_in_place:
        step = recorded_step(model, streams)
    return lambda tokens: step(tokens.to(device)[:, None])[:, 0]


def recorded_step(model: CausalLM, streams: JoinedStates) -> Callable[[Tensor], Tensor]:
    """`model.step` in place as a CUDA graph, which launches the hundreds of kernels of a token at once."""
    assert not isinstance(streams, GroupedStreams)
    ids = torch.zeros_like(streams[0].position[:, None])
    before = [tensor.clone() for tensor in tensors_of(streams)]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # the graph must not record what the first calls set up
        for _ in range(3):
            model.step(ids, streams)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.step(ids, streams)
    for tensor, value in zip(tensors_of(streams), before, strict=True):
        tensor.copy_(value)  # undo the trial steps

    def step(tokens: Tensor) -> Tensor:
        ids.copy_(tokens)
        graph.replay()
        return logits

    return step
