"""Base of all multi-head attentions: projections, heads, rotary positions, padding, packing, output and residual.

Shapes: B batch, T tokens, N new tokens of a stream, H heads, h = d / H head width, d model width,
R rows (one for each document), L tokens of the longest.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError
from lineartime.layers.checks import check_even, check_positive
from lineartime.layers.residual import Mixer, MixerOptions, init_dense, new_positions, zero_padding
from lineartime.ops.layout import document_rows, token_positions
from lineartime.ops.positions import rope
from lineartime.ops.precision import matmul_dtype, output_dtype, without_autocast

State = TypeVar("State", bound=tuple[Any, ...])


class HeadOptions(MixerOptions, total=False):
    """What every multi-head attention takes: see `MultiHeadMixer`."""

    n_heads: int
    rope: bool


class MultiHeadMixer(Mixer):
    """Multi-head attention; a subclass supplies `attend`: [B, T, d] -> [B, T, d].

    `attend` gets every document as a row of its own, with its real tokens first.

    Args:
        n_heads: H, which must divide d.
        rope: whether queries and keys are rotated by their position.
        **options: those of `Mixer`.
    """

    n_maps: ClassVar[int] = 3
    """Projections of the input: queries, keys and values; 2 if queries and keys are the same."""

    def __init__(self, d_model: int, *, n_heads: int = 12, rope: bool = True, **options: Unpack[MixerOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(n_heads=n_heads)
        if d_model % n_heads:
            raise ArgumentError("n_heads", f"is {n_heads}, but must divide d_model = {d_model}.")
        if rope:
            check_even("rotary positions turn pairs of features", head_dim=d_model // n_heads)
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.rope = rope
        self.to_qkv = init_dense(nn.Linear(d_model, self.n_maps * d_model))
        self.to_output = init_dense(nn.Linear(d_model, d_model))

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Queries, keys and values [R, H, L, h] -> [R, H, L, h], of one dtype and with autocast off.

        `real`, bool [R, L], is False behind the tokens of shorter rows, where the three hold zeros; None if all are as long.
        """

    @abstractmethod
    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The same for N more tokens of streams, [B, H, N, h], and the state after them."""

    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Read whole sequences at once: the same contract, shapes and errors as `GAU.forward`."""
        self.check_batch(x, mask, cu_seqlens)
        batch, length, _ = x.shape
        x = zero_padding(x, mask)
        q, k, v = self._project(x, token_positions(length, mask, cu_seqlens, x.device))
        if mask is None and cu_seqlens is None:
            attended = merge_heads(self._attend(q, k, v, None))
        else:
            layout = document_rows(batch, length, mask, cu_seqlens, x.device)
            q, k, v = (self._split_heads(layout.arrange(merge_heads(heads)).flatten(0, 1)) for heads in (q, k, v))
            attended = merge_heads(self._attend(q, k, v, layout.real.flatten(0, 1)))
            attended = layout.restore(attended.view(*layout.real.shape, self.d_model))
        return zero_padding(self.combine(x, attended), mask)

    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Continue streams by N tokens, [B, N, d] -> [B, N, d] and the state after them; `state` stays as it is."""
        self.check_stream(x, state)
        q, k, v = self._project(x, new_positions(state.position, x.shape[1], x.device))
        compute = self.compute_dtype(q, k, v)
        with without_autocast(v):
            attended, state = self.attend_next(q.to(compute), k.to(compute), v.to(compute), state)
        return self.combine(x, merge_heads(attended.to(output_dtype(v, compute)))), state

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """The output map and the residual: x and attention's output [B, T, d] -> [B, T, d]."""
        out: Tensor = x + self.dropout(self.to_output(attended))
        return out

    def compute_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
        """The dtype that `attend` gets its inputs in."""
        return matmul_dtype(q, k, v)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries and keys [B, H, T, h] by their positions, if the layer does so."""
        if not self.rope:
            return q, k
        positions = positions if positions.dim() == 1 else positions[:, None]
        return rope(q, positions), rope(k, positions)

    def empty_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Keys or values of no token, [B, H, 0, h]; ValueError unless the layer is causal."""
        self.check_causal()
        weight = self.to_output.weight
        return weight.new_zeros(batch_size, self.n_heads, 0, self.head_dim, dtype=dtype or weight.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        compute = self.compute_dtype(q, k, v)
        with without_autocast(v):
            return self.attend(q.to(compute), k.to(compute), v.to(compute), real).to(output_dtype(v, compute))

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, T, d] -> [B, H, T, h]."""
        heads: Tensor = x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        return heads

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = [self._split_heads(part) for part in self.to_qkv(self.norm(x)).chunk(self.n_maps, dim=-1)]
        q, k = self.rotate(maps[0], maps[-2], positions)
        return q, k, maps[-1]


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, h] -> [B, T, d]."""
    return x.transpose(1, 2).flatten(2)


def fold_heads(x: Tensor) -> Tensor:
    """[B, H, T, h] -> [B * H, T, h]: heads as rows, for operations that know of no heads."""
    return x.flatten(0, 1)


def map_state(change: Callable[[Tensor], Tensor], state: State) -> State:
    """The state, a NamedTuple, with every tensor in it changed."""
    return type(state)(*(change(part) if isinstance(part, Tensor) else part for part in state))
