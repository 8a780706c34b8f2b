"""Longformer: a sliding window, and global tokens that attend to all tokens and to which all tokens attend.

Shapes: B streams, R rows (one for each document or stream), H heads, L tokens of the longest row, h head width, W window,
n global tokens.
Source: "Longformer: The Long-Document Transformer" (arXiv 2004.05150), with the same projections for global tokens and without
dilation.

    o[i] = sum over j in A(i) of softmax over j (q[i].k[j] / sqrt(h)) v[j]
    A(i) = tokens with |i - j| < W, and the first n; all tokens if i is one of the first n; causal: those of them with j <= i
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import (
    cut_blocks,
    join_blocks,
    joint_softmax,
    masked_products,
    real_tokens,
    visible_band,
    with_global_queries,
    with_neighbours,
)
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import State


def longformer_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, window: int, n_global: int, causal: bool) -> Tensor:
    """The definition for one head of one document: q, k, v [T, h] -> [T, h]. Slow, one query at a time."""
    rows = []
    for i in range(len(q)):
        reads = [j for j in range(len(k)) if (abs(i - j) < window or j < n_global or i < n_global) and (j <= i or not causal)]
        rows.append((k[reads] @ q[i] / q.shape[-1] ** 0.5).softmax(0) @ v[reads])
    return torch.stack(rows)


@dataclass(eq=False)
class LongformerState(State):
    """The state of causal streams, which stops growing after W + n tokens.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        k_global, v_global: [B, H, up to n, h] of the first n tokens.
        k, v: [B, H, up to W - 1, h] of the last W - 1 tokens.
    """

    position: Tensor
    k_global: Tensor
    v_global: Tensor
    k: Tensor
    v: Tensor


class Longformer(MultiHeadMixer):
    """Longformer: a sliding window and global tokens.

    A causal layer streams with constant memory.

    Args:
        window: W; a token attends to tokens at a distance below W. The source counts both sides, 2 W.
        n_global: n, the number of global tokens at the start: all tokens attend to them and, unless the layer is causal, they
            attend to all tokens. 0 leaves the window alone.
        **options: the options of `MultiHeadMixer`.
    """

    name = "longformer"

    def __init__(self, d_model: int, *, window: int = 256, n_global: int = 1, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(window=window)
        if n_global:
            check_positive(n_global=n_global)
        self.window = window
        self.n_global = n_global

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend in blocks of W, with 3 W + n scores per token (causal: 2 W + n): q, k, v [R, H, L, h] -> [R, H, L, h]."""
        length, causal = q.shape[-2], self.causal
        window, n_global = max(1, min(self.window, length)), min(self.n_global, length)  # larger ones also cover everything
        real = real_tokens(q, real)
        tokens = torch.arange(length, device=q.device)
        in_window = real & (tokens >= n_global)  # global tokens are not counted twice
        queries = cut_blocks(q, window)  # [R, H, G, W, h]

        readable = with_neighbours(cut_blocks(in_window[:, None, :, None], window), causal).mT
        near = masked_products(
            queries, with_neighbours(cut_blocks(k, window), causal), readable & visible_band(window, causal, q.device)
        )
        first_keys, first_values = k[..., None, :n_global, :], v[..., None, :n_global, :]
        visible = real[:, None, None, None, :n_global]
        if causal:
            visible = visible & (tokens[:n_global] <= cut_blocks(tokens[:, None], window))
        of_global = masked_products(queries, first_keys, visible)
        out = joint_softmax([(near, with_neighbours(cut_blocks(v, window), causal)), (of_global, first_values)])
        out = join_blocks(out, length)
        # Causal global tokens come before all others, so they already attend to everything visible to them.
        return out if causal else with_global_queries(out, q, k, v, n_global, real)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: LongformerState, packing: Packing
    ) -> tuple[Tensor, LongformerState]:
        window, n_global, compute, position = self.window, self.n_global, acc_dtype(q), packing.common_start or 0
        k_global, v_global, k_near, v_near = (x[:, :, :position] for x in (state.k_global, state.v_global, state.k, state.v))
        outputs = []
        for queries, keys, values in zip(*(x.split(window, 2) for x in (q, k, v)), strict=True):
            keys, values = torch.cat([k_near, keys.to(k_near.dtype)], 2), torch.cat([v_near, values.to(v_near.dtype)], 2)
            stop = position + queries.shape[2]
            first = stop - keys.shape[2]  # the position of the first key
            still_global = slice(position - first, max(position, n_global) - first)
            k_global, v_global = (
                torch.cat([old, new[:, :, still_global]], 2) for old, new in ((k_global, keys), (v_global, values))
            )
            i = torch.arange(position, stop, device=q.device)[:, None]
            j = torch.arange(first, stop, device=q.device)
            band = (j <= i) & (i - j < window) & (j >= n_global)
            near = masked_products(queries.to(compute), keys.to(compute), band)
            before = torch.arange(k_global.shape[2], device=q.device) <= i
            of_global = masked_products(queries.to(compute), k_global.to(compute), before)
            outputs.append(joint_softmax([(near, values.to(compute)), (of_global, v_global.to(compute))]))
            in_reach = slice(max(0, keys.shape[2] - window + 1), None)  # of the next token
            k_near, v_near, position = keys[:, :, in_reach], values[:, :, in_reach], stop
        return torch.cat(outputs, 2), LongformerState(state.position + q.shape[2], k_global, v_global, k_near, v_near)

    def init_own_state(self, batch_size: int) -> LongformerState:
        empty = self.empty_cache(batch_size)
        return LongformerState(self.first_position(batch_size), empty, empty, empty, empty)
