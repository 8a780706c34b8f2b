"""A stack of FLASH layers that processes one more token of a few streams in a single C++ function.

Shapes: B streams, d model width.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lineartime.layers.checks import has_hooks
from lineartime.layers.dense import is_untouched
from lineartime.layers.flash import FLASH
from lineartime.layers.norms import NormParts, norm_parts
from lineartime.layers.positions import TableBias
from lineartime.layers.streams import ShiftedState
from lineartime.native import native_functions
from lineartime.ops.dense import MAX_ROWS
from lineartime.ops.layout import Layout
from lineartime.ops.make_layout import step_layout
from lineartime.ops.mixed_chunk.inputs import MixedChunkStreams
from lineartime.ops.mixed_chunk.step import check_streams
from lineartime.ops.mixed_chunk.step_native import SOURCE, LayerTensors, NativeLayers
from lineartime.ops.token_shift import shifted_width
from lineartime.ops.tracing import is_traced


class FlashStack:
    """Layers inside some modules as they were when the stack was made; see `flash_stack`.

    A step bypasses the modules. `is_current` tells whether they are unchanged since the stack was made, so that later changes,
    such as hooks, are not ignored.
    """

    def __init__(self, modules: nn.Module, layers: Sequence[FLASH], norms: Sequence[NormParts]) -> None:
        self.layers = tuple(layers)
        tensors = [_tensors_of(layer, norm) for layer, norm in zip(layers, norms, strict=True)]
        self._native = NativeLayers(tensors, norms[0].centred, norms[0].eps, layers[0].options)
        self._plan = layers[0].plan()
        watched = [watch for module in modules.modules() for watch in _watched(module)]
        self._dictionaries, self._keys, self._values = zip(*watched, strict=True)
        self._attributes = [vars(module) for module in modules.modules()]
        self._n_attributes = list(map(len, self._attributes))
        self._hooks = [hooks for module in modules.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    @property
    def can_run(self) -> bool:
        """Whether a C++ function supports the dtype, the device and the shapes of the parameters."""
        return self._native.can_run

    @property
    def is_current(self) -> bool:
        """Whether each module still has the same submodules, parameters and attributes, and no hooks."""
        found = map(dict.get, self._dictionaries, self._keys)
        if any(self._hooks) or torch_module._has_any_global_hook() or not all(map(is_, found, self._values)):
            return False
        if list(map(len, self._attributes)) != self._n_attributes:
            return False
        return self._native.addresses_unchanged

    def step_layout(self, positions: Tensor) -> Layout:
        """The layout that `step` needs for one more token of streams at these positions, int64 [B]."""
        return step_layout(positions, plan=self._plan)

    def step(self, x: Tensor, streams: Sequence[Any], layout: Layout) -> Tensor | None:
        """Apply `step_with_layout` of every layer in turn, [B, 1, d] -> [B, 1, d]; return None if this form cannot run.

        Raises:
            ArgumentError: if the streams belong to layers of other sizes.
        """
        first = self.layers[0]
        if any(isinstance(of_layer, ShiftedState) != first.token_shift for of_layer in streams):
            return None
        last = [of_layer.last for of_layer in streams] if first.token_shift else []
        if any(of_layer.shape[1] != shifted_width(first.d_model) for of_layer in last):
            return None
        own = [of_layer.own for of_layer in streams] if first.token_shift else streams
        if len(own) != len(self.layers) or any(type(of_layer) is not MixedChunkStreams for of_layer in own):
            return None
        for of_layer in own:
            check_streams(of_layer, first.chunk_size, first.d_qk, first.d_value)
        return self._native.step(x, layout.rotations, own, last)


_STACKS: WeakKeyDictionary[nn.Module, FlashStack] = WeakKeyDictionary()
"""The latest stack of each list of blocks, cached because making one takes as long as a step."""


def flash_stack(blocks: nn.Module, find_layers: Callable[[], Sequence[nn.Module]], n_streams: int) -> FlashStack | None:
    """Return the stack of the layers in `blocks`, or None if it cannot run or would not be faster.

    A stack consists of unmodified pre-norm FLASH layers that differ only in their parameters.

    Args:
        blocks: the module that contains the layers and anything between them.
        find_layers: returns the layers in order, or nothing if there is anything else between them.
        n_streams: B; for many streams, matrix libraries are faster.
    """
    if is_traced() or torch.is_grad_enabled() or n_streams > MAX_ROWS or native_functions(SOURCE) is None:
        return None
    stack = _STACKS.get(blocks)
    if stack is None or not stack.is_current:
        stack = _new_stack(blocks, find_layers())
        if stack is not None:
            _STACKS[blocks] = stack
    return stack if stack is not None and stack.can_run else None


def _new_stack(blocks: nn.Module, layers: Sequence[nn.Module]) -> FlashStack | None:
    flash = [layer for layer in layers if type(layer) is FLASH and _is_as_built(layer)]
    norms = [norm for norm in (norm_parts(layer.norm) for layer in flash) if norm is not None]
    if not flash or len(norms) < len(layers) or any(map(_is_modified, blocks.modules())):
        return None
    of_layers = zip(flash, norms, strict=True)
    alike = {(layer.plan(), layer.options, layer.d_value, norm.eps, norm.centred) for layer, norm in of_layers}
    return FlashStack(blocks, flash, norms) if len(alike) == 1 else None


def _is_modified(module: nn.Module) -> bool:
    """Whether a module has hooks, or methods of its own in place of those of its class."""
    return has_hooks(module) or any(callable(getattr(type(module), name, None)) for name in vars(module))


def _is_as_built(layer: FLASH) -> bool:
    parts = (layer.to_gate_value_base, layer.to_output)
    of_classes = all(map(is_untouched, parts)) and type(layer.bias) in (TableBias, type(None))
    return of_classes and layer.norm_position == "pre" and not (layer.training and getattr(layer.dropout, "p", True))


def _tensors_of(layer: FLASH, norm: NormParts) -> LayerTensors:
    to_projected, to_output = layer.to_gate_value_base, layer.to_output
    bias = layer.bias.table if isinstance(layer.bias, TableBias) else None
    return LayerTensors(
        layer.gamma, layer.beta, bias, norm.weight, norm.bias,
        to_projected.weight, to_projected.bias, to_output.weight, to_output.bias,
    )  # fmt: skip


def _watched(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield (dictionary, key, value) for everything in a module that must not change."""
    for dictionary in (module._modules, module._parameters):
        yield from ((dictionary, key, value) for key, value in dictionary.items())
    yield from ((vars(module), key, value) for key, value in vars(module).items() if not key.startswith("_"))
