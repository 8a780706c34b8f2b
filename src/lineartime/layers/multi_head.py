"""Base of all multi-head attention layers: projections, heads, rotary positions, padding, packing and output.

Shapes: B batch, T tokens, N new tokens of a stream, H heads, h = d / H head width, d model width,
R rows (one for each document), L tokens of the longest row.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.dense import Dense, factory
from lineartime.layers.mixer import Mixer, MixerOptions
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.cache import KVCache
from lineartime.ops.checks import check_n_heads
from lineartime.ops.positions import over_heads, rotate
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast


class HeadOptions(MixerOptions, total=False):
    """What every multi-head attention takes: see `MultiHeadMixer`."""

    n_heads: int
    rope: bool


class MultiHeadMixer(Mixer):
    """Multi-head attention around an `attend` that a subclass supplies: [B, T, d] -> [B, T, d].

    `attend` receives every document as a separate row, with its real tokens first.

    Args:
        n_heads: H, which must divide d.
        rope: whether to apply rotary positions to queries and keys.
        **options: the options of `Mixer`.
    """

    n_maps: ClassVar[int] = 3
    """The number of input projections: 3 for queries, keys and values; 2 if queries and keys are the same."""

    def __init__(self, d_model: int, *, n_heads: int = 12, rope: bool = True, **options: Unpack[MixerOptions]) -> None:
        super().__init__(d_model, **options)
        check_n_heads(n_heads, {"d_model": d_model}, in_pairs=rope)
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.rope = rope
        self.to_qkv = Dense(d_model, *[d_model] * self.n_maps, **factory(options))
        self.to_output = Dense(d_model, d_model, **factory(options))

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend: queries, keys and values [R, H, L, h] -> [R, H, L, h], all of the same dtype and with autocast off.

        `real`, bool [R, L], is False for the padding at the end of shorter rows, where the inputs are zeros. It is None if
        there is no padding.
        """

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Do the same for N more tokens of streams, [B, H, N, h], and return the new state; `state` may be overwritten."""
        raise NotImplementedError

    def attend_bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Bidirectional `attend`, for prefixes, if the mixer `reads_prefix`."""
        raise NotImplementedError

    def needs(self) -> Needs:
        """Request rotations."""
        return Needs(rotary_width=self.head_dim if self.rope else None, dtype=acc_dtype(self.any_parameter))

    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        """Compute whole sequences of normed tokens: [B, T, d] -> [B, T, d]."""
        q, k, v = self.project(normed, batch)
        return self.combine(normed, self._attend(self.attend, q, k, v, batch))

    def mix_next(self, normed: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Compute N more normed tokens of streams: [B, N, d] -> [B, N, d] and the new state."""
        q, k, v = self.project(normed, batch)
        compute = self.compute_dtype(q, k, v)
        with without_autocast(v):
            attended, state = self.attend_next(q.to(compute), k.to(compute), v.to(compute), state, batch)
        return self.combine(normed, merge_heads(attended.to(output_dtype(v, compute)))), state

    def combine(self, normed: Tensor, attended: Tensor) -> Tensor:
        """Apply the output projection: normed tokens and the attention's output, [B, T, d] each -> [B, T, d]."""
        out: Tensor = self.to_output(attended)
        return out

    def compute_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
        """The dtype of the inputs of `attend`."""
        return matmul_dtype(q, k, v)

    def project(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Project normed tokens [B, T, d] to queries, keys and values [B, H, T, h]."""
        maps = [split_heads(part, self.n_heads) for part in self.to_qkv(x).chunk(self.n_maps, dim=-1)]
        q, k = self.rotate(maps[0], maps[-2], batch.rotations)
        return q, k, maps[-1]

    def rotate(self, q: Tensor, k: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys [B, H, T, h] by their positions, if the layer uses rotary positions."""
        rotations = over_heads(rotations)
        return rotate(q, rotations), rotate(k, rotations)

    def empty_cache(self, batch_size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Keys or values of zero tokens, [B, H, 0, h]."""
        like = self.any_parameter
        return torch.zeros(batch_size, self.n_heads, 0, self.head_dim, dtype=dtype or like.dtype, device=like.device)

    def init_own_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams: by default, a cache of keys and values."""
        empty = self.empty_cache(batch_size)
        return KVCache(self.first_position(batch_size), empty, empty)

    def _attend(self, form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Apply `attend`, or a form of it, to every document, and bidirectionally to prefixes: [B, H, T, h] -> [B, T, d]."""
        if batch.document is None and batch.prefix is None and batch.is_real is None:
            return self._in_heads(form, q, k, v, None)

        def of_rows(form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
            q, k, v = (split_heads(x, self.n_heads) for x in (q, k, v))
            return self._in_heads(form, q, k, v, real)

        def within(q: Tensor, k: Tensor, v: Tensor, inner: Batch) -> Tensor:
            return inner.by_row(partial(of_rows, self.attend_bidirectional), q, k, v)

        tokens = [merge_heads(heads) for heads in (q, k, v)]
        return batch.with_prefix(batch.by_row(partial(of_rows, form), *tokens), within, *tokens)

    def _in_heads(self, form: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Apply a form to rows, [R, H, L, h] -> [R, L, d], in the dtype that the layer computes in."""
        compute = self.compute_dtype(q, k, v)
        with without_autocast(v):
            return merge_heads(form(q.to(compute), k.to(compute), v.to(compute), real).to(output_dtype(v, compute)))


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """[B, T, f] -> [B, H, T, f / H]."""
    return x.view(*x.shape[:-1], n_heads, x.shape[-1] // n_heads).transpose(1, 2)  # torch.compile rejects unflatten in a step


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, T, h] -> [B, T, H * h]."""
    return x.transpose(1, 2).flatten(2)


def fold_heads(x: Tensor) -> Tensor:
    """[B, H, T, h] -> [B * H, T, h]: heads become rows, for operations without heads."""
    return x.flatten(0, 1)
