"""The step of FLASH streams by C++ functions: of a layer between its two projections, or of a stack of whole layers.

Shapes: B streams, d model width, C chunk size, e value width, s query/key width.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lineartime.native import NATIVE_DTYPES, native_functions
from lineartime.ops.dense import MAX_ROWS
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, MixedChunkStreams, Projected, group_size
from lineartime.ops.precision import acc_dtype
from lineartime.ops.tracing import has_plain_memory, is_plain, is_traced

SOURCE = Path(__file__).with_name("step.cpp")

Argument = Tensor | int | float | None


def step(
    projected: Projected,
    bias: Tensor | None,
    rotations: Tensor | None,
    options: MixedChunkOptions,
    streams: MixedChunkStreams,
) -> Tensor | None:
    """`step_projected` of step.py; return None, and leave `streams` unchanged, if this form cannot run."""
    tokens, gamma, beta = projected.tokens.contiguous(), projected.gamma, projected.beta
    bias = None if bias is None else bias.to(tokens.dtype).contiguous()
    if gamma.dtype != tokens.dtype or beta.dtype != tokens.dtype or not is_plain(gamma, beta, bias):
        return None
    if tokens.shape[1:] != (1, 2 * projected.d_value + projected.d_qk) or not gamma.shape == beta.shape == (4, projected.d_qk):
        return None
    if bias is not None and bias.shape != (len(tokens), options.chunk_size):
        return None
    shared = _shared(tokens, projected.d_qk, rotations, options, [streams])
    functions = None if shared is None else native_functions(SOURCE)
    if shared is None or functions is None:
        return None
    gated = tokens.new_empty(*tokens.shape[:-1], projected.d_value)
    functions.call(
        "step", tokens.dtype, *shared, 0, options.chunk_size, 0, projected.d_value, gamma, beta, bias, *streams, tokens, gated
    )
    return gated


class LayerTensors(NamedTuple):
    """The parameters of a FLASH layer, in the order of step.cpp.

    Attributes:
        gamma, beta: [4, s].
        bias: [2 C - 1], a value for each offset j - i, with that of 0 in the middle; or None.
        norm_weight: [d], or [1] if all features share it.
        norm_bias: [d], or None.
        to_projected, projected_bias: [2 e + s, d] and [2 e + s].
        to_output, output_bias: [d, e] and [d].
    """

    gamma: Tensor
    beta: Tensor
    bias: Tensor | None
    norm_weight: Tensor
    norm_bias: Tensor | None
    to_projected: Tensor
    projected_bias: Tensor | None
    to_output: Tensor
    output_bias: Tensor | None


class NativeLayers:
    """A stack of pre-norm FLASH layers that differ only in their parameters.

    Args:
        layers: the parameters of each layer.
        norm_is_centred: whether norms subtract the mean.
        norm_eps: the epsilon that norms add to the variance, or to the mean square.
        options: the options of their attention.
    """

    def __init__(
        self, layers: Sequence[LayerTensors], norm_is_centred: bool, norm_eps: float, options: MixedChunkOptions
    ) -> None:
        first = layers[0]
        self._tensors = [tensor for layer in layers for tensor in layer if tensor is not None]
        self._options, self._dtype = options, first.gamma.dtype
        self._d_qk, (self._d_model, self._d_value) = first.gamma.shape[1], first.to_output.shape
        self._norm = (int(len(first.norm_weight) > 1), int(norm_is_centred), float(norm_eps))
        self._bias_offsets = (0, 0, 0) if first.bias is None else (options.chunk_size - 1, 0, -1)
        self._addresses = self._current_addresses()
        self._rows = [[0 if tensor is None else tensor.data_ptr() for tensor in layer] for layer in layers]
        self.can_run: Final = all(map(self._fits, layers)) and self._dtype in NATIVE_DTYPES

    @property
    def addresses_unchanged(self) -> bool:
        """Whether the parameters are still at the same addresses."""
        return self._current_addresses() == self._addresses

    def step(
        self,
        x: Tensor,
        rotations: Tensor | None,
        streams: Sequence[MixedChunkStreams],
        last: Sequence[Tensor],
    ) -> Tensor | None:
        """Pass one more token of a few streams through all layers; return None if this form cannot run.

        Args:
            x: [B, 1, d].
            rotations: [2, B, 1, s / 2], or None.
            streams: the streams of each layer, updated in place. The caller has checked their sizes: see `check_streams`.
            last: [B, shifted] for each layer, the first normed features of the previous token, updated in place; empty
                without a token shift.

        Returns:
            [B, 1, d].
        """
        if is_traced() or torch.is_grad_enabled() or not self.can_run or not 0 < len(x) <= MAX_ROWS:
            return None
        shifted = last[0].shape[-1] if last else 0
        if x.dtype != self._dtype or x.shape[1:] != (1, self._d_model) or shifted > self._d_model:
            return None
        if any(of_layer.shape != (len(x), shifted) for of_layer in last):
            return None
        if not is_plain(*last) or any(of_layer.dtype != self._dtype for of_layer in last):
            return None
        shared = _shared(x, self._d_qk, rotations, self._options, streams)
        functions = None if shared is None else native_functions(SOURCE)
        if shared is None or functions is None:
            return None
        of_last = [of_layer.data_ptr() for of_layer in last] or [0] * len(streams)
        rows = (
            [*row, place, *(tensor.data_ptr() for tensor in of_layer)]
            for row, place, of_layer in zip(self._rows, of_last, streams, strict=True)
        )
        addresses = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64, device="cpu")  # whatever the default is
        out = torch.empty_like(x)
        functions.call(
            "layers_step", self._dtype, *shared, *self._bias_offsets, self._d_value,
            addresses, len(streams), *self._norm, shifted, self._d_model, x, out,
        )  # fmt: skip
        return out

    def _current_addresses(self) -> list[tuple[int, int, bool]]:
        return [(tensor.data_ptr(), tensor.nbytes, tensor.is_contiguous()) for tensor in self._tensors]  # for every token

    def _fits(self, layer: LayerTensors) -> bool:
        """Whether the parameters of a layer have the sizes and the dtype of the first layer and can be used from C++."""
        d_model, d_value, d_qk = self._d_model, self._d_value, self._d_qk
        width = 2 * d_value + d_qk
        wanted = (
            (4, d_qk), (4, d_qk), (2 * self._options.chunk_size - 1,), (d_model if self._norm[0] else 1,), (d_model,),
            (width, d_model), (width,), (d_model, d_value), (d_model,),
        )  # fmt: skip
        fit = (x is None or (x.shape == shape and x.dtype == self._dtype) for x, shape in zip(layer, wanted, strict=True))
        has_bias = self._bias_offsets != (0, 0, 0)
        return all(fit) and (layer.bias is not None) == has_bias and all(x is None or has_plain_memory(x) for x in layer)


def _shared(
    tokens: Tensor,
    d_qk: int,
    rotations: Tensor | None,
    options: MixedChunkOptions,
    streams: Sequence[MixedChunkStreams],
) -> tuple[Argument, ...] | None:
    """The first arguments of both functions, or None if they cannot run; the caller has checked the sizes of streams."""
    dtype, wide = tokens.dtype, acc_dtype(tokens)
    if dtype not in NATIVE_DTYPES or tokens.device.type != "cpu" or options.activation != "relu2" or d_qk % 2:
        return None
    if not is_plain(tokens, rotations, *chain.from_iterable(streams)):
        return None
    # Not reached in an exported program, which is not plain: comparing the batch size would fix it there.
    n_streams = len(tokens)
    turns = 0 if rotations is None else rotations.shape[1]
    if rotations is not None and (rotations.shape != (2, turns, 1, d_qk // 2) or turns not in (1, n_streams)):
        return None
    if not n_streams or any(len(x) != n_streams for x in chain.from_iterable(streams)):
        return None
    if rotations is not None and rotations.dtype != wide:
        return None
    if any([x.dtype for x in of_layer] != [wide, dtype, dtype, torch.int64] for of_layer in streams):
        return None
    length = options.published_length
    score_scale = d_qk**-0.5 if length is None else 1 / length
    published, divides_by_chunk_size = int(length is not None), int(options.divides_by_chunk_size)
    group = group_size(options.chunk_size)
    return rotations, turns, published, divides_by_chunk_size, score_scale, n_streams, group, options.chunk_size, d_qk
