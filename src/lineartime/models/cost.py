"""What a model costs: parameters, operations, and memory, on the meta device, where tensors have shapes but no values."""

import json
from collections.abc import Collection, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lineartime.choices import MAX_CONTEXT_LENGTH
from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_type
from lineartime.machine import memory_bytes, shapes_only
from lineartime.models.config import ModelConfig, PartsConfig
from lineartime.models.language_model import CausalLM, LanguageModel, build_model
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
    return model.n_parameters - sum(blocks) + _of_all(blocks, config.n_blocks)


def _of_all(first_round: Iterable[int], n_blocks: int) -> int:
    """The sum of a number over all blocks, from those of the first round, which all others repeat."""
    return sum(islice(cycle(first_round), n_blocks))


def _flops(config: ModelConfig, ids: Tensor) -> int:
    """Operations of the whole model, from those of its first round."""
    found: list[int] = []
    counter = _Shapes()
    with shapes_only():
        model = build_model(config.first_round)
    with torch.no_grad(), counter:
        for block in model.backbone.blocks:
            block.register_forward_pre_hook(lambda *_: found.append(-counter.flops))
            block.register_forward_hook(lambda *_: found.append(found.pop() + counter.flops))
        model(ids)
    return counter.flops - sum(found) + _of_all(found, config.n_blocks)


def check_context_length(context_length: int) -> None:
    """Raise ArgumentError unless the context length is an integer from 1 to 2^24."""
    check_type("context_length", context_length, Annotated[int, Between(1, MAX_CONTEXT_LENGTH)])


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
    with shapes_only(), torch.no_grad(), _Shapes():
        model = build_model(config.first_round)
        if not isinstance(model, CausalLM):
            return None
        _, state = model.extend(torch.zeros(1, context_length, dtype=torch.long), model.init_state(1))
    return _of_all([block.nbytes for block in state.blocks], config.n_blocks)


def forward_flops(model: nn.Module, ids: Tensor) -> int:
    """Operations in the matrix products of a forward pass, of a model and ids on the meta device."""
    counter = _Shapes()
    with torch.no_grad(), counter:
        model(ids)
    return counter.flops


class _Shapes(TorchDispatchMode):
    """Run operations on the meta device, and count those of matrix products in `flops`.

    PyTorch takes a tenth of a millisecond or more for the shape of a result, so that results are kept by the shapes of the
    inputs. Those of views and of operations in place, which belong to their inputs, are not.
    """

    _results: ClassVar[dict[Any, Tensor]] = {}

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # which takes a tenth of a second to import

        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self._formulas = 0, flop_registry

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        key = func, _signature(args), _signature([*options.items()])
        if (result := self._results.get(key)) is not None:
            result = result.detach()
        else:
            result = func(*args, **options)
            if isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
                self._results[key] = result
        if func.overloadpacket in self._formulas:
            self.flops += self._formulas[func.overloadpacket](*args, **options, out_val=result)
        return result


def _signature(value: Any) -> Any:
    """All of an input on which the shape of a result depends, as a key."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_signature, value)) if isinstance(value, (tuple, list)) else (type(value), value)


_WEIGHT_BYTES = 4
"""Bytes per weight; weights are always fp32."""
_ID_BYTES = 16
"""Bytes per token of a step: its id among the inputs and among the targets."""
_BLOCKS = "backbone.blocks."
_EMBEDDED = ("vocab_size", "max_positions")
"""The options on which the size of blocks does not depend."""


def model_tensors(config: PartsConfig) -> Iterator[tuple[str, Tensor]]:
    """The names of all tensors of a model, block after block, and tensors on the meta device. Raises as `_first_tensors`."""
    rest, blocks, n_blocks = _first_tensors(config)
    yield from rest.items()
    for number, block in enumerate(islice(cycle(blocks), n_blocks)):
        yield from ((f"{_BLOCKS}{number}.{name}", tensor) for name, tensor in block.items())


def _first_tensors(config: PartsConfig) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], int]:
    """The tensors outside of blocks that repeat, those of the first of these blocks, on the meta device, and their number.

    Raises ArgumentError, naming the model's largest option, if they are too large for PyTorch.
    """
    try:
        with shapes_only():
            model = build_model(config.first_round) if isinstance(config, ModelConfig) else config.build()
            tensors = model.state_dict()
        if _n_elements(tensors) > 2**60:
            raise OverflowError
    except (RuntimeError, OverflowError, MemoryError):
        raise too_large(config, "which no tensor can have") from None
    if not (isinstance(config, ModelConfig) and isinstance(model, LanguageModel)):  # an encoder-decoder, with all its blocks
        return tensors, [], 0
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BLOCKS)}
    return rest, [block.state_dict() for block in model.backbone.blocks], config.n_blocks


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
    (rest, blocks, n_blocks), memory = _first_tensors(config), memory_bytes(device or torch.device("cpu"))
    if memory is None:
        return
    parameters = _n_elements(rest) + _of_all(map(_n_elements, blocks), n_blocks)
    weights = parameters * _WEIGHT_BYTES * copies // processes
    if weights > memory:
        needed = f"with which the model has {parameters:,} parameters and needs at least {size(weights)}"
        in_blocks = 2 * _n_elements(rest) < parameters
        raise too_large(config, f"{needed}, but there are {size(memory)} of memory", _EMBEDDED if in_blocks else ())
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


def too_large(config: PartsConfig, why: str, excluded: Collection[str] = ()) -> ArgumentError:
    """The error for a model that is too large. It names the largest number in the model's config that is not `excluded`."""
    numbers = {name: value for name, value in config.values.items() if type(value) is int and name not in excluded}
    name = max(numbers, key=numbers.__getitem__)
    return ArgumentError(name, f"is {numbers[name]:,}, {why}: use a smaller model.")


def _n_elements(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
