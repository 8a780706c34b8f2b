"""What a model costs: parameters, operations and memory, on the meta device, where tensors have shapes but no values.

Only the first block of each mixer is built: all others repeat it.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from lineartime.choices import MAX_CONTEXT_LENGTH
from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_type
from lineartime.machine import memory_bytes, shapes_only
from lineartime.models.config import ModelConfig, PartsConfig
from lineartime.models.language_model import CausalLM, build_model
from lineartime.units import size

COSTS = Path(__file__).with_name("costs.json")
"""The costs of all presets at 4,096 tokens or as many as one reads, which `python tests/cli/test_presets.py` computes anew."""
COSTS_LENGTH = 4096
_WEIGHT_BYTES = 4
"""Bytes per weight; weights are always fp32."""
_ID_BYTES = 16
"""Bytes per token of a step: its id among the inputs and among the targets."""
_BLOCKS = "backbone.blocks."


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


def check_context_length(context_length: int) -> None:
    """Raise ArgumentError unless the context length is an integer from 1 to 2^24."""
    check_type("context_length", context_length, Annotated[int, Between(1, MAX_CONTEXT_LENGTH)])


def preset_cost(name: str, config: ModelConfig, context_length: int) -> tuple[int, Cost]:
    """The cost of a preset at so many tokens or, if it reads fewer, at those, whose number is returned with it."""
    known = json.loads(COSTS.read_text("utf-8")) if context_length == COSTS_LENGTH else {}
    if name in known:
        return known[name][0], Cost(*known[name][1:])
    length = min(context_length, config.longest_sequence or context_length)
    return length, cost(config, length)


def cost(config: ModelConfig, context_length: int) -> Cost:
    """The cost of a model with `context_length` tokens of context. Raises ArgumentError if the model cannot read as many."""
    check_context_length(context_length)
    longest = config.longest_sequence
    if longest is not None and context_length > longest:
        raise ArgumentError("context_length", f"is {context_length}, but the model reads at most {longest} tokens.")
    model = _first_round(config)
    flops = forward_flops(model, torch.zeros(1, context_length, dtype=torch.long, device="meta"))
    places = range(config.first_round.n_blocks)
    blocks = [flops.get(f"{type(model).__name__}.{_BLOCKS}{place}", 0) for place in places]
    whole = flops["Global"] - sum(blocks) + _of_all(blocks, config.n_blocks)
    return Cost(count_parameters(config), whole / context_length, stream_bytes(config, context_length))


def forward_flops(model: nn.Module, ids: Tensor) -> dict[str, int]:
    """Operations in the matrix products of a forward pass on the meta device, by module; "Global" are those of all."""
    from torch.utils.flop_counter import FlopCounterMode  # which takes a tenth of a second to import

    model.requires_grad_(False)  # or the counter would follow gradients
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    return {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}


def stream_bytes(config: ModelConfig, context_length: int) -> int | None:
    """The size of the state of one stream after `context_length` tokens; None for a model that cannot stream."""
    model = _first_round(config)
    if not isinstance(model, CausalLM):
        return None
    with shapes_only(), torch.no_grad():
        _, state = model.extend(torch.zeros(1, context_length, dtype=torch.long))
    return _of_all([block.nbytes for block in state.blocks], config.n_blocks)


def count_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model."""
    model = _first_round(config)
    parts: list[nn.Module] = [model, *model.backbone.blocks]
    whole, *blocks = (sum(parameter.numel() for parameter in part.parameters()) for part in parts)
    return whole - sum(blocks) + _of_all(blocks, config.n_blocks)


def _of_all(first_round: Iterable[int], n_blocks: int) -> int:
    """The sum of a number over all blocks, from those of the first round."""
    return sum(islice(cycle(first_round), n_blocks))


def _first_round(config: PartsConfig) -> Any:
    """A language model with one block of each mixer, or an encoder-decoder with all blocks, on the meta device.

    Raises ArgumentError, naming the model's largest option, if its tensors are too large for PyTorch.
    """
    try:
        with shapes_only():
            model = build_model(config.first_round) if isinstance(config, ModelConfig) else config.build()
        if sum(tensor.numel() for tensor in model.state_dict().values()) > 2**60:
            raise OverflowError
    except (RuntimeError, OverflowError, MemoryError):
        raise _too_large(config, "which no tensor can have") from None
    return model


def _tensors(config: PartsConfig) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], int]:
    """The tensors outside of blocks that repeat, those of each block of the first round, and the number of such blocks."""
    model = _first_round(config)
    tensors: dict[str, Tensor] = model.state_dict()
    if not isinstance(config, ModelConfig):
        return tensors, [], 0
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BLOCKS)}
    return others, [block.state_dict() for block in model.backbone.blocks], config.n_blocks


def model_tensors(config: PartsConfig) -> Iterator[tuple[str, Tensor]]:
    """The names of all tensors of a model, block after block, and tensors on the meta device. Raises as `_first_round`."""
    others, blocks, n_blocks = _tensors(config)
    yield from others.items()
    for number, block in enumerate(islice(cycle(blocks), n_blocks)):
        yield from ((f"{_BLOCKS}{number}.{name}", tensor) for name, tensor in block.items())


def check_memory(
    config: PartsConfig,
    device: torch.device | None = None,  # the CPU by default
    *,
    copies: int = 1,  # of the weights: 4 in training, including gradients and two moments
    processes: int = 1,  # that share the weights
    sequences: int = 1,  # that are read at once
    tokens: int = 0,  # in these sequences
    kept_blocks: int = 1,  # whose activations are in memory at the same time
    number_bytes: int = 4,  # of an activation value
    step_tokens: int = 0,  # of a whole step, of which only the ids are in memory: inputs and targets
) -> None:
    """Raise ArgumentError, naming the option that is too large, if a model needs more memory than the device has.

    The estimate is a lower bound: a model that passes may still not fit.
    """
    (others, blocks, n_blocks), memory = _tensors(config), memory_bytes(device or torch.device("cpu"))
    if memory is None:
        return
    outside, *inside = (sum(tensor.numel() for tensor in part.values()) for part in (others, *blocks))
    parameters = outside + _of_all(inside, n_blocks)
    weights = parameters * _WEIGHT_BYTES * copies // processes
    if weights > memory:
        needed = f"with which the model has {parameters:,} parameters and needs at least {size(weights)}"
        elsewhere = ("vocab_size", "max_positions") if 2 * outside < parameters else ()  # most are in blocks
        raise _too_large(config, f"{needed}, but there are {size(memory)} of memory", elsewhere)
    features = [sum(each.shape[0] for each in block.values() if each.dim() > 1) for block in blocks]  # of linear maps
    token = number_bytes * _of_all(features, kept_blocks)
    one, at_once = weights + tokens // sequences * token, weights + tokens * token
    for option, count, least in (
        ("context_length", tokens // sequences, one),
        ("batch_size", tokens, at_once),
        ("tokens_per_batch", step_tokens, at_once + step_tokens * _ID_BYTES),
    ):
        if least > memory:
            what = f"puts {count:,} tokens in memory at once, for which the model needs at least {size(least)}"
            raise ArgumentError(option, f"{what}, but there are {size(memory)} of memory: use a smaller one.")


def _too_large(config: PartsConfig, why: str, excluded: Collection[str] = ()) -> ArgumentError:
    """The error for a model that is too large. It names the largest number in the model's config that is not `excluded`."""
    numbers = {name: value for name, value in config.values.items() if type(value) is int and name not in excluded}
    name = max(numbers, key=numbers.__getitem__)
    return ArgumentError(name, f"is {numbers[name]:,}, {why}: use a smaller model.")
