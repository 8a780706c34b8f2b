"""A copy of what a C++ function needs to continue streams of a FLASH model, so that a token is one call.

Shapes: B streams, d model width, C chunk size, e value width, s query/key width, V vocabulary.
"""

import ctypes
import struct
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lineartime.errors import ArgumentError
from lineartime.host import use_large_pages
from lineartime.layers.dense import MAX_ROWS, Embedding, has_hooks, is_untouched, quantized
from lineartime.layers.flash import FLASH
from lineartime.layers.mesa import FLASHMesa, MemoryState, folded
from lineartime.layers.positions import LearnedPositions, ScaledSin
from lineartime.layers.residual import norm_parts
from lineartime.models.backbone import Backbone, Block, ModelState
from lineartime.native import NATIVE_DTYPES, NativeFunctions, native_functions
from lineartime.ops.modes import acc_dtype, has_plain_memory
from lineartime.ops.positions import rotary_table

SOURCE = Path(__file__).with_name("decode.cpp")
MAX_STREAMS = MAX_ROWS
"""The maximum number of streams that a decoder continues at once."""
_NEAR = 64
"""Angles are sums, of the angle of a position that is divisible by this, and of one below: `near` in decode.cpp."""
_LONG, _ADDRESS, _NUMBER = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


def _fields(*values: float | bytes | None) -> bytes:
    """A struct of decode.cpp, whose fields have eight bytes each: numbers, addresses, which may be None, and other structs."""
    parts = (x if isinstance(x, bytes) else struct.pack("d" if isinstance(x, float) else "q", x or 0) for x in values)
    return b"".join(parts)


class _Bound(NamedTuple):
    """A state, the addresses of its tensors, and memory for intermediate values."""

    state: ModelState
    threads: int
    addresses: Tensor
    memory: Tensor
    arguments: tuple[Any, ...]


class NativeDecoder:
    """Continues streams of a FLASH model by a token each, on a CPU: see `native_decoder`.

    It reads the weights where they were when it was made, and some from copies. After weights change, make a new one. Every
    call updates the tensors of the state in place. Their addresses are looked up only when another state object is given.
    """

    def __init__(self, backbone: Backbone, head: nn.Linear | None, functions: NativeFunctions, int8: bool) -> None:
        layers: list[Any] = [block.mixer for block in backbone.blocks]
        first, position = layers[0], backbone.position
        self._backbone, self._dtype, self.int8 = backbone, first.gamma.dtype, int8
        self._kept: list[Tensor] = []
        self._shifted = first.token_shift
        self._recalling = [place for place, layer in enumerate(layers) if isinstance(layer, FLASHMesa)]
        self._like = [self._tensors(layer.init_state(0)) for layer in layers]
        self._vocabulary = backbone.embedding.weight.shape[0]
        rotated = first.d_qk // 2 if first.rope else 0
        sines = first.d_model // 2 if isinstance(position, ScaledSin) else 0
        counts, near = [n for n in (rotated, sines) if n], torch.arange(_NEAR, device="cpu")
        frequencies = [10000.0 ** -(torch.arange(n, dtype=torch.float64, device="cpu") / n) for n in counts]
        tables = [rotary_table(near, n, torch.float64).permute(1, 2, 0) for n in counts]
        table = position.table if isinstance(position, LearnedPositions) else None
        embedding = self._matrix(backbone.embedding.weight, None)
        self._d, self._chunk_size, self._n_learned = first.d_model, first.chunk_size, 0 if table is None else len(table)
        model = _fields(
            len(layers), first.d_model, first.d_value, first.d_qk, first.chunk_size, self._vocabulary,
            first.shifted_width, first.normalization != "count", first.normalization == "paper_sum",
            first.scales().score, rotated, rotated + sines,
            self._keep(torch.cat(frequencies) if counts else None), self._keep(torch.cat(tables, 1) if counts else None),
            embedding,
            self._keep(None if backbone.token_types is None else backbone.token_types.weight),
            self._keep(position.scale if isinstance(position, ScaledSin) else None),
            self._keep(table), self._n_learned,
            self._norm(backbone.embedding_norm), self._norm(backbone.norm),
            embedding if head is None else self._matrix(head.weight, head.bias),
            self._keep(b"".join(map(self._layer, layers))),
        )  # fmt: skip
        self._model = self._keep(model)
        use_large_pages((x.data_ptr(), x.nbytes) for x in self._kept)
        types = (_ADDRESS, _ADDRESS, _LONG, _ADDRESS, _LONG)
        sampling = (_NUMBER, _LONG, _NUMBER, _NUMBER)
        self._bytes = functions.function("bytes", _ADDRESS, _LONG, _LONG)
        self._decode = functions.function("decode", *types, _ADDRESS, _ADDRESS, _ADDRESS, *sampling, _ADDRESS)
        self._bound: _Bound | None = None

    def logits(self, ids: Tensor, state: ModelState) -> Tensor:
        """Read a token of every stream: int64 [B] -> logits [B, V]. Updates `state` in place.

        Raises:
            ArgumentError: for an id outside the vocabulary, a position beyond the last, or a state of another model.
        """
        out = ids.new_empty(len(ids), self._vocabulary, dtype=self._dtype)
        self._run(state, ids, out)
        return out

    def hidden(self, embedded: Tensor, state: ModelState) -> Tensor:
        """Read an embedded token of every stream: [B, 1, d] -> hidden vectors [B, 1, d]. Raises as `logits`."""
        out = embedded.clone()
        self._check("embedded", out, self._dtype, len(state), 1, self._d)
        self._run(state, None, out)
        return out

    def draw(
        self, tokens: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, state: ModelState
    ) -> Tensor:
        """Read a token of every stream, int64 [B], and draw the next ones, int64 [B], -1 where the logits are not finite.

        These are the tokens that `pick` draws by the same numbers, `uniform`, float64 [B], in [0, 1), with options as in
        `Sampling`. Updates `state` in place. Raises as `logits`.
        """
        self._check("uniform", uniform, torch.float64, len(tokens))
        drawn = torch.empty_like(tokens)
        self._run(state, tokens, None, uniform, (temperature, top_k, top_p, min_p), drawn)
        return drawn

    def _run(
        self,
        state: ModelState,
        ids: Tensor | None,
        out: Tensor | None,
        uniform: Tensor | None = None,
        sampling: tuple[float, int, float, float] = (0.0, 0, 1.0, 0.0),
        drawn: Tensor | None = None,
    ) -> None:
        bound = self._bound
        if bound is None or bound.state is not state or bound.threads != torch.get_num_threads():
            bound = self._bound = self._bind(state)
        if ids is not None:
            self._check("ids", ids, torch.int64, len(state))
        pointers = [None if x is None else x.data_ptr() for x in (ids, out, uniform, drawn)]
        wrong = self._decode(*bound.arguments, *pointers[:3], *sampling, pointers[3])  # the stream that it refuses, from 1
        if wrong and ids is not None and not 0 <= int(ids[wrong - 1]) < self._vocabulary:
            last = self._vocabulary - 1
            raise ArgumentError("ids", f"holds {int(ids[wrong - 1])}, but must be from 0 to vocab_size - 1 = {last}.")
        if wrong:
            limit = f"is {self._n_learned}, the number of learned positions"
            raise ArgumentError("max_positions", f"{limit}, but a stream has as many tokens.")
        if self._recalling and (state.position % self._chunk_size == 0).any():
            with torch.inference_mode():  # which updates every state in place, also one that was made in this mode
                for block in [state.blocks[place] for place in self._recalling]:
                    folded(block.own if self._shifted else block)

    def _bind(self, state: ModelState) -> _Bound:
        """The addresses of a state, which are found once for all tokens."""
        self._backbone.check_state(state, state.position)
        every, streams, threads = [self._tensors(block) for block in state.blocks], len(state), torch.get_num_threads()
        for tensors, likes in zip(every, self._like, strict=True):
            for tensor, like in zip(tensors, likes, strict=True):
                if like is not None:
                    self._check("state", tensor, like.dtype, streams, *like.shape[1:])
        addresses = torch.tensor([[0 if x is None else x.data_ptr() for x in tensors] for tensors in every], device="cpu")
        # PyTorch does not see what C++ writes: this lets it refuse the gradient of what read these tensors before.
        torch.autograd.graph.increment_version([tensor for tensor in state.tensors() if not tensor.is_inference()])
        memory = torch.zeros(self._bytes(self._model, streams, threads) + 64, dtype=torch.uint8, device="cpu")
        aligned = -memory.data_ptr() % 64 + memory.data_ptr()
        return _Bound(state, threads, addresses, memory, (self._model, addresses.data_ptr(), streams, aligned, threads))

    def _tensors(self, block: Any) -> list[Any]:
        """The tensors of the state of a block that are those of `State` in decode.cpp, or None."""
        shifted, own = (block.last, block.own) if self._shifted else (None, block)
        last = own.last if isinstance(own, MemoryState) else None
        return [shifted, own.summary, own.keys, own.values, own.position, last]

    def _check(self, argument: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
        if x.shape != shape or x.dtype != dtype or not has_plain_memory(x):
            wanted = f"{list(shape)} in {dtype}, contiguous on a CPU"
            raise ArgumentError(argument, f"has shape {list(x.shape)} in {x.dtype} on {x.device}, but must have {wanted}.")

    def _keep(self, x: Tensor | bytes | None) -> int | None:
        """The address of a tensor, or of bytes, which stay alive as long as the decoder."""
        if x is None:
            return None
        x = torch.frombuffer(bytearray(x), dtype=torch.uint8) if isinstance(x, bytes) else x.detach().contiguous()
        self._kept.append(x)
        return x.data_ptr()

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> bytes:
        """A `Matrix`: the weights, the factors of rows, and what is added."""
        rounded, scale = quantized(weight) if self.int8 else (weight, None)
        return _fields(self._keep(rounded), self._keep(scale), self._keep(bias))

    def _norm(self, norm: nn.Module) -> bytes:
        parts = norm_parts(norm)
        if parts is None:
            return _fields(None, None, 0, 0, 0.0)
        weight, bias, centred, eps = parts
        return _fields(self._keep(weight), self._keep(bias), len(weight) > 1, centred, eps)

    def _layer(self, layer: FLASH) -> bytes:
        to_projected, to_output, bias = layer.to_gate_value_base, layer.to_output, None
        if layer.bias is not None:  # of the last token of a chunk, [C], from which a shift gives that of any other
            bias = layer.bias(layer.chunk_size)[: layer.chunk_size].to(acc_dtype(layer.gamma))
        return _fields(
            self._keep(layer.gamma), self._keep(layer.beta), self._keep(bias), self._norm(layer.norm),
            self._matrix(to_projected.weight, to_projected.bias), self._matrix(to_output.weight, to_output.bias),
        )  # fmt: skip


@torch.no_grad()
def native_decoder(backbone: Backbone, head: nn.Module | None, int8: bool = False) -> NativeDecoder | None:
    """Make a decoder of a backbone and its output layer, the embedding if it is None; None if C++ does not compute the same.

    It computes models of unmodified FLASH layers with the activation relu2 on a CPU. With `int8`, matrices are `quantized`.
    """
    if type(backbone) is not Backbone or torch.is_autocast_enabled("cpu") or any(map(is_modified, backbone.modules())):
        return None
    if not all(map(_is_plain_block, backbone.blocks)):
        return None
    layers: list[Any] = [block.mixer for block in backbone.blocks]
    names = ("d_model", "d_value", "d_qk", "chunk_size", "normalization", "rope", "token_shift")
    if len({tuple(getattr(each, name) for name in names) for each in layers}) != 1:
        return None
    parameters = [*backbone.parameters(), *(() if head is None else head.parameters())]
    dtype = parameters[0].dtype
    if dtype not in NATIVE_DTYPES or not all(x.dtype == dtype and has_plain_memory(x) for x in parameters):
        return None
    if not all(norm_parts(norm) or type(norm) is nn.Identity for norm in (backbone.norm, backbone.embedding_norm)):
        return None
    if type(backbone.embedding) is not Embedding or type(backbone.token_types) not in (Embedding, NoneType):
        return None
    if type(backbone.position) not in (ScaledSin, LearnedPositions, NoneType):
        return None
    if head is not None and not (isinstance(head, nn.Linear) and is_untouched(head)):
        return None
    functions = native_functions(SOURCE, dtype, *(["WEIGHT=int8_t"] if int8 else []))
    return None if functions is None else NativeDecoder(backbone, head, functions, int8)


def is_modified(module: nn.Module) -> bool:
    """Whether a module has hooks, or methods of its own in place of those of its class."""
    return has_hooks(module) or any(callable(getattr(type(module), name, None)) for name in vars(module))


def _is_plain_block(block: Block) -> bool:
    layer: Any = block.mixer
    if type(block) is not Block or type(block.feed_forward) is not nn.Identity or type(layer) not in (FLASH, FLASHMesa):
        return False
    dropped = layer.training and getattr(layer.dropout, "p", True)
    untouched = is_untouched(layer.to_gate_value_base) and is_untouched(layer.to_output) and norm_parts(layer.norm) is not None
    return untouched and layer.activation == "relu2" and not dropped
