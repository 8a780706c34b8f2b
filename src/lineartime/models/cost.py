"""The cost of a model, found by running it on the meta device, where tensors have shapes but no values.

Shapes: T tokens of context.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lineartime.choices import MAX_CONTEXT_LENGTH
from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_limits
from lineartime.machine import shapes_only
from lineartime.models.config import ModelConfig
from lineartime.models.language_model import CausalLM, LanguageModel, build_model
from lineartime.models.layer_config import LayerConfig
from lineartime.ops.checks import check_positive


class Cost(NamedTuple):
    """The cost of a model.

    Attributes:
        parameters: number of parameters.
        flops_per_token: operations in the matrix products of a forward pass over T tokens, divided by T. A multiplication and
            an addition count as two. Softmax attention counts all T x T products, even if a kernel skips masked ones; causal
            relu^2 attention counts the blocks that it computes. Sums outside matrix products are not counted.
        state_bytes: size of the state of one stream after T tokens, in float32; None for a model that cannot stream.
    """

    parameters: int
    flops_per_token: float
    state_bytes: int | None


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model."""
    return _over_blocks(config, lambda model: model.n_parameters)


def _over_blocks(config: ModelConfig, measure: Callable[[LanguageModel], int]) -> int:
    """A measure of the whole model, from models of one and two blocks of each mixer, whose blocks are identical."""
    rest, blocks = 0, 0
    for mixer, count in config.blocks_of.items():
        with shapes_only():
            one, two = (measure(build_model(replace(config, mixer=mixer, pattern=(), n_blocks=n))) for n in (1, 2))
        rest, blocks = 2 * one - two, blocks + count * (two - one)
    return rest + blocks


def check_context_length(context_length: int) -> None:
    """Raise ArgumentError unless the context length is an integer from 1 to 2^30."""
    check_positive(context_length=context_length)
    check_limits("context_length", context_length, [Between(most=MAX_CONTEXT_LENGTH)])


def cost(config: ModelConfig, context_length: int) -> Cost:
    """The cost of a model with `context_length` tokens of context. Raises ArgumentError if the model cannot read as many."""
    check_context_length(context_length)
    longest = config.longest_sequence
    if longest is not None and context_length > longest:
        raise ArgumentError("context_length", f"is {context_length}, but the model reads at most {longest} tokens.")
    ids = torch.zeros(1, context_length, dtype=torch.long, device="meta")
    flops = _over_blocks(config, lambda model: _forward_flops(model, ids))
    return Cost(count_parameters(config), flops / context_length, stream_bytes(config, context_length))


def stream_bytes(config: ModelConfig, context_length: int) -> int | None:
    """The size of the state of one stream after `context_length` tokens; None for a model that cannot stream."""
    with shapes_only(), torch.no_grad():
        model = build_model(config.first_round)
        if not isinstance(model, CausalLM):
            return None
        _, state = model.extend(torch.zeros(1, context_length, dtype=torch.long), model.init_state(1))
    own: dict[LayerConfig, int] = {mixer: block.nbytes for mixer, block in zip(config.mixers, state.blocks, strict=False)}
    return sum(own[mixer] * count for mixer, count in config.blocks_of.items())


def _forward_flops(model: LanguageModel, ids: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    flops: int = counter.get_total_flops()
    return flops
