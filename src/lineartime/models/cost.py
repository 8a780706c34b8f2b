"""What a model costs: parameters, operations, and memory, on the meta device, where tensors have shapes but no values."""

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lineartime.choices import MAX_CONTEXT_LENGTH
from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_limits
from lineartime.machine import memory_bytes, shapes_only
from lineartime.models.config import LayerConfig, ModelConfig, PartsConfig
from lineartime.models.language_model import CausalLM, build_model
from lineartime.ops.checks import check_positive
from lineartime.units import size


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


COSTS = Path(__file__).with_name("costs.json")
"""The costs of all presets at 4,096 tokens or as many as one reads, which `python tests/cli/test_presets.py` computes anew."""
COSTS_LENGTH = 4096


def preset_cost(name: str, config: ModelConfig, context_length: int) -> tuple[int, Cost]:
    """The cost of a preset at so many tokens or, if it reads fewer, at those, whose number is returned with it."""
    known = json.loads(COSTS.read_text("utf-8")) if context_length == COSTS_LENGTH else {}
    if name in known:
        return known[name][0], Cost(*known[name][1:])
    length = min(context_length, config.longest_sequence or context_length)
    return length, cost(config, length)


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model, of which all blocks of a mixer are alike."""
    with shapes_only():
        model = build_model(config.first_round)
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.backbone.blocks]
    of_all = sum(blocks[place % len(blocks)] for place in range(config.n_blocks))
    return model.n_parameters - sum(blocks) + of_all


def _flops(config: ModelConfig, ids: Tensor) -> int:
    """Operations of the whole model, from models of one and two blocks of each mixer, whose blocks are identical."""
    rest, blocks = 0, 0
    for mixer, count in config.blocks_of.items():
        with shapes_only():
            models = (build_model(replace(config, mixer=mixer, pattern=(), n_blocks=n)) for n in (1, 2))
            one, two = (forward_flops(model, ids) for model in models)
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
    return Cost(count_parameters(config), _flops(config, ids) / context_length, stream_bytes(config, context_length))


def stream_bytes(config: ModelConfig, context_length: int) -> int | None:
    """The size of the state of one stream after `context_length` tokens; None for a model that cannot stream."""
    with shapes_only(), torch.no_grad():
        model = build_model(config.first_round)
        if not isinstance(model, CausalLM):
            return None
        _, state = model.extend(torch.zeros(1, context_length, dtype=torch.long), model.init_state(1))
    own: dict[LayerConfig, int] = {mixer: block.nbytes for mixer, block in zip(config.mixers, state.blocks, strict=False)}
    return sum(own[mixer] * count for mixer, count in config.blocks_of.items())


def forward_flops(model: nn.Module, ids: Tensor) -> int:
    """Operations in the matrix products of a forward pass, of a model and ids on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # which takes a tenth of a second to import

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    flops: int = counter.get_total_flops()
    return flops


_WEIGHT_BYTES = 4
"""Bytes per weight; weights are always fp32."""
_ID_BYTES = 16
"""Bytes per token of a step: its id among the inputs and among the targets."""
_BLOCKS = "backbone.blocks."
_EMBEDDED = ("vocab_size", "max_positions")
"""The options on which the size of blocks does not depend."""


class ModelTensors(NamedTuple):
    """The tensors of a model on the meta device: those of the blocks that repeat, by their names in a block, and the rest."""

    blocks: tuple[dict[str, Tensor], ...]
    rest: dict[str, Tensor]
    n_blocks: int

    @property
    def n_tensors(self) -> int:
        """The number of tensors in the whole model."""
        return len(self.rest) + self.of_blocks(len)

    @property
    def n_elements(self) -> int:
        """The number of elements in all tensors."""
        return _n_elements(self.rest) + self.of_blocks(_n_elements)

    def of_blocks(self, measure: Callable[[dict[str, Tensor]], int]) -> int:
        """The sum of a measure of a block over all blocks."""
        round_ = len(self.blocks)
        return sum(measure(block) * len(range(place, self.n_blocks, round_)) for place, block in enumerate(self.blocks))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors on the meta device by their names in the model."""
        yield from self.rest.items()
        for number, block in zip(range(self.n_blocks), cycle(self.blocks), strict=False):
            yield from ((f"{_BLOCKS}{number}.{name}", tensor) for name, tensor in block.items())


def model_tensors(config: PartsConfig) -> ModelTensors:
    """The tensors of a model. Raises ArgumentError, naming its largest option, if they are too large for PyTorch."""
    try:
        with shapes_only():
            if not isinstance(config, ModelConfig):  # an encoder-decoder has two kinds of blocks: all are among the rest
                return ModelTensors((), config.build().state_dict(), 0)
            model = build_model(config.first_round)
            tensors = model.state_dict()
        if _n_elements(tensors) > 2**60:
            raise OverflowError
    except (RuntimeError, OverflowError, MemoryError):
        raise too_large(config, "which no tensor can have") from None
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BLOCKS)}
    return ModelTensors(tuple(block.state_dict() for block in model.backbone.blocks), rest, config.n_blocks)


def check_memory(
    config: PartsConfig,
    device: torch.device | None = None,
    *,
    copies: int = 1,
    processes: int = 1,
    sequences: int = 1,
    tokens: int = 0,
    kept_blocks: int = 1,
    number_bytes: int = 4,
    step_tokens: int = 0,
) -> None:
    """Raise ArgumentError, naming the option that is too large, if a model needs more memory than the device has.

    The estimate is a lower bound: a model that passes may still not fit.

    Args:
        config: the model.
        device: where it computes; the default is the CPU.
        copies: the number of copies of its weights in memory: 4 in training, including gradients and two moments.
        processes: the number of processes that share its weights.
        sequences: the number of sequences that it reads at once.
        tokens: the number of tokens in these sequences.
        kept_blocks: the number of blocks whose activations are in memory at the same time.
        number_bytes: bytes per activation value.
        step_tokens: the number of tokens of a whole step, of which only the ids are in memory: inputs and targets.
    """
    tensors = model_tensors(config)
    memory = memory_bytes(device or torch.device("cpu"))
    if memory is None:
        return
    weights = tensors.n_elements * _WEIGHT_BYTES * copies // processes
    if weights > memory:
        needed = f"with which the model has {tensors.n_elements:,} parameters and needs at least {size(weights)}"
        in_blocks = 2 * _n_elements(tensors.rest) < tensors.n_elements
        raise too_large(config, f"{needed}, but there are {size(memory)} of memory", _EMBEDDED if in_blocks else ())
    kept = tensors._replace(n_blocks=kept_blocks)  # of linear maps, the features that they compute
    token = number_bytes * kept.of_blocks(lambda block: sum(each.shape[0] for each in block.values() if each.dim() > 1))
    one, at_once = weights + tokens // sequences * token, weights + tokens * token
    for option, count, least in (
        ("context_length", tokens // sequences, one),
        ("batch_size", tokens, at_once),
        ("tokens_per_batch", step_tokens, at_once + step_tokens * _ID_BYTES),
    ):
        if least > memory:
            what = f"puts {count:,} tokens in memory at once, for which the model needs at least {size(least)}"
            raise ArgumentError(option, f"{what}, but there are {size(memory)} of memory: use a smaller one.")


def too_large(config: PartsConfig, why: str, excluded: Collection[str] = ()) -> ArgumentError:
    """The error for a model that is too large. It names the largest number in the model's config that is not `excluded`."""
    numbers = {name: value for name, value in config.values.items() if type(value) is int and name not in excluded}
    name = max(numbers, key=numbers.__getitem__)
    return ArgumentError(name, f"is {numbers[name]:,}, {why}: use a smaller model.")


def _n_elements(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
