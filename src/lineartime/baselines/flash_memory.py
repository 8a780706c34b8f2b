"""FLASH with another memory: what the chunks before leave for the linear part, in place of the sum of their k v^T.

Shapes: B batch or streams, T tokens, N new tokens of a stream, G chunks, C chunk size, s query/key width, e value width.
The definitions are in `lineartime.ops.mixed_chunk.memories`; the quadratic part is that of `FLASH`.

    q_lin = u / |u| with u = silu(x Wq + bq)      k_lin the same, with a map of its own
    b = sigmoid(x Wb + bb)                        one for each token; decay: one for each feature of the keys
    w = b (delta, mesa);  b / (1 - b + b / 100)   (proximal)
    a = the geometric mean of b over a chunk      (decay)

Queries and keys of FLASH are scaled from one base Z: what a feature tells of a key, it tells of a query, too. With their own
maps, a key can tell what the token before was, which recall needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.errors import ArgumentError, check_choice
from lineartime.layers.dense import Dense, factory
from lineartime.layers.gated import GatedOptions
from lineartime.layers.mixer import Part
from lineartime.ops.batch import Batch
from lineartime.ops.chunks import open_chunk_pieces
from lineartime.ops.mixed_chunk import stream
from lineartime.ops.mixed_chunk.memories import Memory, chunk_terms, fold, read, solve, weighted_keys, weights_inside
from lineartime.ops.mixed_chunk.stream import MixedChunkState, mixed_chunk_state
from lineartime.ops.precision import acc_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.state import State


def flash_memory_oracle(
    memory: Memory, q: Tensor, k: Tensor, v: Tensor, b: Tensor, *, chunk_size: int, ridge: float = 1.0
) -> Tensor:
    """The definition of the linear part for one causal document: [T, s], [T, s], [T, e], [T, 1] or [T, s] -> [T, e]."""
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    unit, p = torch.eye(k.shape[1], dtype=v.dtype), v.new_zeros(k.shape[1], k.shape[1])
    for start in range(0, len(v), chunk_size):
        chunk = slice(start, start + chunk_size)
        keys, values, strengths = k[chunk], v[chunk], b[chunk]
        rows.append(q[chunk] @ s)
        if memory == "mesa":
            solved = q[chunk] @ torch.linalg.inv(ridge * unit + p)
            rows[-1] = rows[-1] + (solved @ keys.mT @ torch.diag(strengths[:, 0])).tril() @ values
        if len(keys) < chunk_size:  # no later chunk reads it
            break
        w = torch.diag(strengths[:, 0])
        if memory == "decay":
            s = torch.diag(strengths.log().mean(0).exp()) @ s + keys.mT @ values
        elif memory == "delta":
            s = s + keys.mT @ w @ (values - keys @ s) / chunk_size
        elif memory == "proximal":
            w = torch.diag(strengths[:, 0] / (1 - strengths[:, 0] + strengths[:, 0] / 100))
            s = torch.linalg.inv(unit + keys.mT @ w @ keys) @ (s + keys.mT @ w @ values)
        else:
            before, p = p, p + keys.mT @ w @ keys
            s = torch.linalg.inv(ridge * unit + p) @ ((ridge * unit + before) @ s + keys.mT @ w @ values)
    return torch.cat(rows)


@dataclass(eq=False)
class FLASHMemoryState(State):
    """The state of causal streams, of constant size.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        summary: [B, s, e], S of the complete chunks.
        precision: [B, s, s], P of mesa; [B, 0, 0] for others.
        open_chunk: keys, weighted keys and values of the open chunk.
    """

    position: Tensor
    summary: Tensor
    precision: Tensor
    open_chunk: MixedChunkState


class FLASHMemory(FLASHInParts):
    """FLASH with a memory that forgets or corrects.

    Args:
        memory: "decay", "delta", "proximal" or "mesa".
        **options: the options of `FLASH`, which apply to the quadratic part; the linear part has no divisor and no positions.
    """

    name = "flash-memory"
    n_maps = 2
    any_positions = False
    constant_state = False

    def __init__(
        self,
        d_model: int,
        *,
        memory: Memory = "mesa",
        chunk_size: int = 256,
        relative_bias: bool = True,
        **options: Unpack[GatedOptions],
    ) -> None:
        check_choice("memory", memory, get_args(Memory))
        if not options.get("causal", False) and memory != "mesa":
            raise ArgumentError("memory", f"is {memory!r}, whose order of chunks matters: use causal=True, or 'mesa'.")
        super().__init__(d_model, chunk_size=chunk_size, relative_bias=relative_bias, **options)
        self.memory: Memory = memory
        self.to_memory = Dense(d_model, self.d_qk, self.d_qk, **factory(options))
        self.to_strength = Dense(d_model, self.d_qk if memory == "decay" else 1, **factory(options))
        self.log_ridge = nn.Parameter(torch.empty(1, **factory(options))) if memory == "mesa" else None
        self.init_own()

    def init_own(self) -> None:
        """Begin with a ridge of 1; the rest as in `FLASH`."""
        super().init_own()
        ridge: Tensor | None = getattr(self, "log_ridge", None)  # which the base initialises before it is there
        if ridge is not None:
            nn.init.zeros_(ridge)

    def project(self, normed: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        """The gate, the values, and queries and keys of both parts; for decay, also the logarithms of its factors."""
        gate, v, (q_quad, k_quad) = super().project(normed, batch)
        q, k = (F.normalize(each, dim=-1, eps=1e-6) for each in F.silu(self.to_memory(normed)).chunk(2, -1))
        return gate, v, (q_quad, k_quad, q, *weighted_keys(self.memory, k, self.to_strength(normed)).split(self.d_qk, -1))

    @property
    def ridge(self) -> Tensor | float:
        """The ridge of mesa, which the others do not use."""
        return 1.0 if self.log_ridge is None else self.log_ridge.to(acc_dtype(self.log_ridge)).exp()

    def attend_chunks(self, parts: Sequence[Part], maps: list[Tensor], v: Tensor, chunks: Batch, bias: Tensor | None) -> Tensor:
        """The sum of parts: queries and keys, each [B, G, C, s], and values [B, G, C, w] -> [B, G, C, w]."""
        q_quad, k_quad, q, *x = maps
        out = torch.zeros_like(v)
        if "local" in parts:
            out = out + self.quadratic_part(q_quad, k_quad, v, chunks, bias)
        if "global" in parts:
            out = out + read(self.memory, q, torch.cat(x, -1), v, chunks, causal=self.causal, ridge=self.ridge)
        return out

    def attend_next(
        self, maps: Sequence[Tensor], v: Tensor, state: FLASHMemoryState, batch: Batch
    ) -> tuple[Tensor, FLASHMemoryState]:
        size, compute, start = self.chunk_size, matmul_dtype(*maps, v), batch.first_position
        summary, precision, own, bias = state.summary, state.precision, state.open_chunk, self.slot_bias(batch)
        outputs = [v[:, :0].to(output_dtype(v, compute))]
        for new, first, last in open_chunk_pieces(start, v.shape[1], size):
            q_quad, k_quad, q, *x = (each[:, new] for each in maps)
            here = replace(batch, start=start + new.start)
            local, own = stream.extend(q_quad, None, [k_quad, *x], v[:, new], bias, self.options, own, here)
            with without_autocast(v):
                outputs.append(local + (q.to(compute) @ summary.to(compute)).to(local.dtype))
                x_own = own.keys[:, 1:].transpose(1, 2).flatten(2)
                if self.memory == "mesa":
                    solved = solve(precision, q.mT.to(precision.dtype), self.ridge).mT
                    inside = weights_inside(solved, x_own[:, :last]).tril(first).to(local.dtype)
                    outputs[-1] = outputs[-1] + inside @ own.values[:, :last].to(local.dtype)
                if last == size:  # the chunk is full
                    terms = chunk_terms(self.memory, x_own, own.values)
                    summary, precision = fold(self.memory, summary, precision, terms, size, self.ridge)
        return torch.cat(outputs, 1), FLASHMemoryState(batch.after(state.position), summary, precision, own)

    def init_own_state(self, batch_size: int) -> FLASHMemoryState:
        like = self.any_parameter
        own = mixed_chunk_state(
            batch_size, self.chunk_size, self.d_qk, self.d_value, like, maps=3 if self.memory == "decay" else 2, linear=False
        )
        summary = torch.zeros(batch_size, self.d_qk, self.d_value, dtype=acc_dtype(like), device=like.device)
        width = self.d_qk if self.memory == "mesa" else 0
        return FLASHMemoryState(own.position.clone(), summary, summary.new_zeros(batch_size, width, width), own)
