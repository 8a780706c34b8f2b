"""A copy of what a C++ function needs to continue streams of a FLASH model, so that a token is one call.

Shapes: B streams, d model width, C chunk size, e value width, s query/key width, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lineartime.errors import ArgumentError
from lineartime.layers.dense import MAX_ROWS, Dense, Embedding, has_hooks, is_untouched
from lineartime.layers.flash import FLASH
from lineartime.layers.positions import LearnedPositions, ScaledSin
from lineartime.layers.residual import norm_parts
from lineartime.models.backbone import Backbone
from lineartime.models.block import Block
from lineartime.native import NATIVE_DTYPES, native_functions
from lineartime.ops.positions import FactoredBias, rotary_table
from lineartime.ops.precision import acc_dtype
from lineartime.ops.token_shift import shifted_width
from lineartime.ops.tracing import has_plain_memory

SOURCE = Path(__file__).with_name("decode.cpp")
MAX_STREAMS = MAX_ROWS
"""The maximum number of streams that a decoder continues at once."""
_NEAR = 64
"""Angles are sums, of the angle of a position that is divisible by this, and of one below: `near` in decode.cpp."""
_LONG, _ADDRESS, _NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Norm(ctypes.Structure):
    _fields_ = [("weight", _ADDRESS), ("bias", _ADDRESS), ("by", _LONG), ("centred", _LONG), ("eps", _NUMBER)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _ADDRESS) for name in ("gamma", "beta", "bias")),
        ("norm", _Norm),
        *((name, _ADDRESS) for name in ("to_projected", "projected_bias", "to_output", "output_bias")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _LONG) for name in ("layers", "d", "e", "s", "c", "vocabulary", "shifted", "published", "divides_by_chunk")),
        ("score_scale", _NUMBER),
        *((name, _LONG) for name in ("rotated", "angles")),
        *((name, _ADDRESS) for name in ("frequencies", "cosines", "embedding", "token_type", "sine_scale", "places")),
        ("n_places", _LONG),
        *((name, _Norm) for name in ("embedding_norm", "norm")),
        *((name, _ADDRESS) for name in ("to_logits", "logits_bias", "layer")),
    ]


class _Bound(NamedTuple):
    """A state, the addresses of its tensors, and memory for intermediate values."""

    state: Any
    streams: int
    threads: int
    addresses: Tensor
    memory: Tensor
    first: tuple[Any, ...]


class NativeDecoder:
    """Continues streams of a FLASH model by a token each, on a CPU: see `native_decoder`.

    It reads the weights where they were when it was made, and some from copies. After weights change, make a new one.
    A state has the tuple `blocks`, and keeps its tensors, which every call updates in place: their addresses are looked up only
    when another state object is given. Each block has

        summary [B, s, e], in float32 or better, the sum of k_lin v^T over all complete chunks
        keys [B, 2, C, s], values [B, C, e], of the open chunk, in the dtype of the model
        position int64 [B], the number of tokens read

    With a token shift, it has `last` [B, h], the features of the last token that are shifted, and these in `own`.
    """

    def __init__(self, backbone: Backbone, head: nn.Linear | None) -> None:
        layers: list[Any] = [block.mixer for block in backbone.blocks]
        first = layers[0]
        self._kept: list[Any] = []
        self._dtype, self._wide = first.gamma.dtype, acc_dtype(first.gamma)
        self._sizes = (first.d_model, first.d_value, first.d_qk, first.chunk_size)
        self._shifted = shifted_width(first.d_model) if first.token_shift else 0
        d, e, s, c = self._sizes
        self._n_layers, self._vocabulary = len(layers), backbone.embedding.weight.shape[0]
        length = first.options.published_length
        rotated = s // 2 if first.rope else 0
        counts, near = [n for n in (rotated, self._sines(backbone)) if n], torch.arange(_NEAR, device="cpu")
        frequencies = [10000.0 ** -(torch.arange(n, dtype=torch.float64, device="cpu") / n) for n in counts]
        tables = [rotary_table(near, n, torch.float64).permute(1, 2, 0) for n in counts]
        position = backbone.position
        table = position.table if isinstance(position, LearnedPositions) else None
        n_angles = rotated + self._sines(backbone)
        self._native = _Model(
            len(layers), d, e, s, c, self._vocabulary, self._shifted,
            length is not None, first.options.divides_by_chunk_size, s**-0.5 if length is None else 1 / length,
            rotated, n_angles,
            self._keep(torch.cat(frequencies) if n_angles else None), self._keep(torch.cat(tables, 1) if n_angles else None),
            self._keep(backbone.embedding.weight),
            self._keep(None if backbone.token_types is None else backbone.token_types.weight),
            self._keep(position.scale if isinstance(position, ScaledSin) else None),
            self._keep(table), 0 if table is None else len(table),
            self._norm(backbone.embedding_norm), self._norm(backbone.norm),
            self._keep(backbone.embedding.weight if head is None else head.weight),
            self._keep(None if head is None else head.bias),
        )  # fmt: skip
        native = (_Layer * len(layers))(*map(self._layer, layers))
        self._kept.append(native)
        self._native.layer = ctypes.addressof(native)
        functions = native_functions(SOURCE)
        assert functions is not None
        types = (_ADDRESS, _ADDRESS, _LONG, _ADDRESS, _LONG)
        sampling = (_NUMBER, _LONG, _NUMBER, _NUMBER)
        self._bytes = functions.function("bytes", self._dtype, _ADDRESS, _LONG, _LONG)
        self._decode = functions.function("decode", self._dtype, *types, _ADDRESS, _ADDRESS, _ADDRESS, *sampling, _ADDRESS)
        self._bound: _Bound | None = None

    def logits(self, ids: Tensor, state: Any) -> Tensor:
        """Read a token of every stream: int64 [B] -> logits [B, V]. Updates `state` in place.

        Raises:
            ArgumentError: for an id outside the vocabulary, a position beyond the last, or a state of another model.
        """
        bound = self._bind(state)
        self._check("ids", ids, bound, torch.int64)
        out = ids.new_empty(bound.streams, self._vocabulary, dtype=self._dtype)
        wrong = self._decode(*bound.first, ids.data_ptr(), out.data_ptr(), None, 0.0, 0, 1.0, 0.0, None)
        return out if not wrong else self._refuse(ids, bound, wrong)

    def hidden(self, embedded: Tensor, state: Any) -> Tensor:
        """Read an embedded token of every stream: [B, 1, d] -> hidden vectors [B, 1, d], after the last norm.

        Raises:
            ArgumentError: as `logits`.
        """
        bound = self._bind(state)
        self._check("embedded", embedded, bound, self._dtype, 1, self._sizes[0])
        out = embedded.clone()
        wrong = self._decode(*bound.first, None, out.data_ptr(), None, 0.0, 0, 1.0, 0.0, None)
        return out if not wrong else self._refuse(None, bound, wrong)

    def draw(
        self,
        tokens: Tensor,
        uniform: Tensor,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        state: Any,
    ) -> Tensor:
        """Read a token of every stream, int64 [B], and draw the next ones, as `pick` does by the same uniform numbers.

        Args:
            tokens: int64 [B].
            uniform: float64 [B], in [0, 1).
            temperature, top_k, top_p, min_p: as in `Sampling`.
            state: what came before; updated in place.

        Returns:
            int64 [B]; -1 where the logits are not finite.

        Raises:
            ArgumentError: as `logits`.
        """
        bound = self._bind(state)
        self._check("tokens", tokens, bound, torch.int64)
        self._check("uniform", uniform, bound, torch.float64)
        drawn = torch.empty_like(tokens)
        wrong = self._decode(
            *bound.first, tokens.data_ptr(), None, uniform.data_ptr(), temperature, top_k, top_p, min_p, drawn.data_ptr()
        )
        return drawn if not wrong else self._refuse(tokens, bound, wrong)

    def _bind(self, state: Any) -> _Bound:
        """The addresses of a state, which are found once for all tokens."""
        bound, threads = self._bound, torch.get_num_threads()
        if bound is not None and bound.state is state and bound.threads == threads:
            return bound
        first_block = state.blocks[0]
        streams = len((first_block.own if self._shifted else first_block).position)
        if len(state.blocks) != self._n_layers or not 0 < streams <= MAX_STREAMS:
            found = f"has {len(state.blocks)} blocks and {streams} streams"
            raise ArgumentError(
                "state", f"{found}, but must have {self._n_layers} blocks, and from 1 to {MAX_STREAMS} streams."
            )
        addresses = torch.tensor([self._addresses(block, streams) for block in state.blocks], dtype=torch.int64, device="cpu")
        # PyTorch does not see what C++ writes: this lets it refuse the gradient of what read these tensors before.
        torch.autograd.graph.increment_version([tensor for tensor in state.tensors() if not tensor.is_inference()])
        model = ctypes.addressof(self._native)
        memory = torch.zeros(self._bytes(model, streams, threads) + 64, dtype=torch.uint8, device="cpu")
        aligned = -memory.data_ptr() % 64 + memory.data_ptr()
        first = (model, addresses.data_ptr(), streams, aligned, threads)
        self._bound = bound = _Bound(state, streams, threads, addresses, memory, first)
        return bound

    def _addresses(self, block: Any, streams: int) -> list[int]:
        _, e, s, c = self._sizes
        own = block.own if self._shifted else block
        wanted = {
            "summary": (own.summary, (streams, s, e), self._wide),
            "keys": (own.keys, (streams, 2, c, s), self._dtype),
            "values": (own.values, (streams, c, e), self._dtype),
            "position": (own.position, (streams,), torch.int64),
        }
        if self._shifted:
            wanted = {"last": (block.last, (streams, self._shifted), self._dtype), **wanted}
        for name, (tensor, shape, dtype) in wanted.items():
            if tensor.shape != shape or tensor.dtype != dtype or not has_plain_memory(tensor):
                found = f"has {name} of shape {list(tensor.shape)} in {tensor.dtype} on {tensor.device}"
                raise ArgumentError("state", f"{found}, but must have {list(shape)} in {dtype}, contiguous on a CPU.")
        addresses = [tensor.data_ptr() for tensor, _, _ in wanted.values()]
        return addresses if self._shifted else [0, *addresses]

    def _check(self, argument: str, x: Tensor, bound: _Bound, dtype: torch.dtype, *shape: int) -> None:
        if x.shape != (bound.streams, *shape) or x.dtype != dtype or not x.is_contiguous() or not x.is_cpu:
            wanted = f"{[bound.streams, *shape]} in {dtype}, contiguous on a CPU"
            raise ArgumentError(argument, f"has shape {list(x.shape)} in {x.dtype} on {x.device}, but must have {wanted}.")

    def _refuse(self, ids: Tensor | None, bound: _Bound, wrong: int) -> Tensor:
        """Raise the ArgumentError about the stream that the C++ function refused, counted from 1."""
        if ids is not None and not 0 <= int(ids[wrong - 1]) < self._vocabulary:
            last = self._vocabulary - 1
            raise ArgumentError("ids", f"holds {int(ids[wrong - 1])}, but must be from 0 to vocab_size - 1 = {last}.")
        raise ArgumentError(
            "max_positions", f"is {self._native.n_places}, the number of learned positions, but a stream has as many tokens."
        )

    @staticmethod
    def _sines(backbone: Backbone) -> int:
        return backbone.embedding.weight.shape[1] // 2 if isinstance(backbone.position, ScaledSin) else 0

    def _keep(self, x: Tensor | None) -> int | None:
        """The address of a tensor, which stays alive as long as the decoder."""
        if x is None:
            return None
        self._kept.append(x := x.detach().contiguous())
        return x.data_ptr()

    def _norm(self, norm: nn.Module) -> _Norm:
        parts = norm_parts(norm)
        if parts is None:
            return _Norm()
        weight, bias, centred, eps = parts
        return _Norm(self._keep(weight), self._keep(bias), int(len(weight) > 1), int(centred), eps)

    def _layer(self, layer: FLASH) -> _Layer:
        to_projected, to_output = layer.to_gate_value_base, layer.to_output
        return _Layer(
            self._keep(layer.gamma), self._keep(layer.beta), self._keep(self._bias(layer)), self._norm(layer.norm),
            self._keep(to_projected.weight), self._keep(to_projected.bias), self._keep(to_output.weight),
            self._keep(to_output.bias),
        )  # fmt: skip

    def _bias(self, layer: FLASH) -> Tensor | None:
        """The relative bias of the last token of a chunk for all of them, [C], from which a shift gives that of any other."""
        if layer.bias is None:
            return None
        c = layer.chunk_size
        slots = torch.arange(c, device="cpu")
        bias = layer.bias(slots[-1:], slots)
        return (bias.dense() if isinstance(bias, FactoredBias) else bias)[0].to(self._wide)


@torch.no_grad()
def native_decoder(backbone: Backbone, head: nn.Module | None) -> NativeDecoder | None:
    """Make a decoder of a backbone and its output layer, the embedding if it is None; None if C++ does not compute the same.

    It computes models of unmodified FLASH layers with the activation relu2 on a CPU.
    """
    blocks, parameters = list(backbone.blocks), [*backbone.parameters(), *(() if head is None else head.parameters())]
    if type(backbone) is not Backbone or torch.is_autocast_enabled("cpu") or any(map(is_modified, backbone.modules())):
        return None
    if not all(map(_is_plain_block, blocks)) or not _are_alike([block.mixer for block in blocks]):
        return None
    dtype = parameters[0].dtype
    if dtype not in NATIVE_DTYPES or not all(x.dtype == dtype and has_plain_memory(x) for x in parameters):
        return None
    if not all(norm_parts(norm) or type(norm) is nn.Identity for norm in (backbone.norm, backbone.embedding_norm)):
        return None
    embeddings = [backbone.embedding, *([] if backbone.token_types is None else [backbone.token_types])]
    if any(type(part) is not Embedding for part in embeddings) or type(backbone.position) not in _POSITIONS:
        return None
    if head is not None and not (isinstance(head, nn.Linear) and is_untouched(head)):
        return None
    return None if native_functions(SOURCE) is None else NativeDecoder(backbone, head)


_POSITIONS = (ScaledSin, LearnedPositions, type(None))


def is_modified(module: nn.Module) -> bool:
    """Whether a module has hooks, or methods of its own in place of those of its class."""
    return has_hooks(module) or any(callable(getattr(type(module), name, None)) for name in vars(module))


def _is_plain_block(block: Block) -> bool:
    layer = block.mixer
    if type(block) is not Block or type(block.feed_forward) is not nn.Identity or type(layer) is not FLASH:
        return False
    parts: Sequence[nn.Module] = (layer.to_gate_value_base, layer.to_output)
    dropped = layer.training and getattr(layer.dropout, "p", True)
    untouched = all(type(part) is Dense and is_untouched(part) for part in parts) and norm_parts(layer.norm) is not None
    return untouched and layer.activation == "relu2" and not dropped


def _are_alike(layers: Sequence[Any]) -> bool:
    """Whether layers have the same sizes and options."""
    sizes = {(layer.options, layer.d_model, layer.d_value, layer.d_qk, layer.rope, layer.token_shift) for layer in layers}
    return len(sizes) == 1
