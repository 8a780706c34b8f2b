"""Softmax attention of a token to a set A(i) of the others: windows, strides, blocks, or the largest scores.

    o[i] = sum over j in A(i) of softmax over j (s[i, j]) v[j]        s[i, j] = q[i].k[j] / sqrt(h)

    sparse:         A(i) = tokens with |i - j| < S or (i - j) a multiple of S, both of the source's patterns in one softmax
    longformer:     A(i) = tokens with |i - j| < W, and the first n; all tokens if i is one of the first n
    bigbird:        A(i) = tokens of i's own block g and of the blocks g - 1 and g + 1, of the first n blocks, and of r random
                    blocks; all tokens if g is one of the first n
    explicit-topk:  A(i) = the tokens whose score is at least the k-th largest of i's scores; all of them if they are k or fewer

    causal: those of them with j <= i

Random blocks are chosen from the blocks that are neither near nor global. These candidates, in order, are cut into r equal
parts, and a hash of (head, g, part) chooses one block of each part. The candidates of a causal block end before it, so its
random blocks do not depend on later tokens.

All tokens whose score equals the k-th largest are in A(i), as published, so that their order does not matter. A(i) can then
have more than k tokens. All T x T scores are computed.

Shapes: B streams, T tokens, R rows (one for each document or stream), H heads, L tokens of the longest row, h head width,
S stride or block size, G blocks of a row, W window, K keys that a token attends to at most.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import (
    StreamState,
    cut_blocks,
    join_blocks,
    joint_softmax,
    masked_products,
    open_chunk_pieces,
    real_tokens,
    scaled_products,
    with_neighbours,
)
from lineartime.layers.attention import HeadOptions, MultiHeadMixer, append
from lineartime.layers.dense import factory
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache

GATHERED = 8192
"""The number of keys of a head that a stream gathers at a time; bounds the memory for a long prompt."""
COMPARED = 2**20
"""The number of pairs of a new and a cached token that a stream compares at a time; bounds the memory for a long prompt."""


def visible_band(size: int, causal: bool, device: torch.device, reach: int) -> Tensor:
    """Which keys of a block and its neighbours are closer than `reach` and, if causal, not later: bool [S, 2 S or 3 S]."""
    offsets = torch.arange((2 if causal else 3) * size, device=device) - size
    distance = torch.arange(size, device=device)[:, None] - offsets
    return (distance < reach) & (distance >= 0 if causal else distance > -reach)


def attend_near_and_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor,
    size: int,
    reach: int,
    n_first: int,
    causal: bool,
    others: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Attend to tokens in and beside the own block that are closer than `reach`, and to the first tokens of the row.

    The first tokens attend to all: q, k, v [R, H, L, h] -> [R, H, L, h]. `real`, bool [R or 1, L], is False for padding.
    `others` returns the scores and values of further keys, [R, H, G, S, K] and [R, H, G, K, h], of blocks [R, H, G, S, h].
    """
    tokens = torch.arange(q.shape[-2], device=q.device)
    blocks = q_blocks, k_blocks, v_blocks = cut_blocks(q, size), cut_blocks(k, size), cut_blocks(v, size)
    elsewhere = real & (tokens >= n_first)  # the first tokens are not counted twice
    visible = with_neighbours(cut_blocks(elsewhere[:, None, :, None], size), causal).mT
    visible = visible & visible_band(size, causal, q.device, reach)
    near = masked_products(q_blocks, with_neighbours(k_blocks, causal), visible)
    visible = real[:, None, None, None, :n_first]
    if causal:
        visible = visible & (tokens[:n_first] <= cut_blocks(tokens[:, None], size))
    of_first = masked_products(q_blocks, k[..., None, :n_first, :], visible)
    parts = [(near, with_neighbours(v_blocks, causal)), (of_first, v[..., None, :n_first, :])]
    out = join_blocks(joint_softmax(parts if others is None else [*parts, others(*blocks)]), q.shape[-2])
    if causal:  # the first tokens come before all others, so they already attend to everything visible to them
        return out
    everything = masked_products(q[..., :n_first, :], k, real[:, None, None, :])
    return torch.cat([joint_softmax([(everything, v)]), out[..., n_first:, :]], -2)


class Sparse(MultiHeadMixer):
    """Sparse Transformer: nearby tokens and every n-th token.

    Args:
        stride: S; a value near the square root of the sequence length has the lowest cost.
        **options: the options of `MultiHeadMixer`.

    Source: "Generating Long Sequences with Sparse Transformers" (arXiv 1904.10509).
    """

    name = "sparse"

    def __init__(self, d_model: int, *, stride: int = 128, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(stride=stride)
        self.stride = stride

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend to near tokens and every S-th one, with S + L / S scores per token: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        length, causal = q.shape[-2], self.causal
        stride = max(1, min(self.stride, length))  # a larger stride also covers everything
        blocks = max(1, -(-length // stride))

        def columns(x: Tensor) -> Tensor:
            """Group tokens that are multiples of S apart: [..., G, S, f] -> [..., S, G, f], and back."""
            return x.transpose(-3, -2)

        # [R, H, G, S, h], and [R or 1, 1, G, S, 1]
        q, k, v, present = (cut_blocks(x, stride) for x in (q, k, v, real_tokens(q, real)[:, None, :, None]))

        readable = with_neighbours(present, causal).mT & visible_band(stride, causal, q.device, stride)
        near = masked_products(q, with_neighbours(k, causal), readable)  # [R, H, G, S, 2 S or 3 S]

        others = ~torch.eye(blocks, dtype=torch.bool, device=q.device)  # the near tokens include the token itself
        others = others.tril() if causal else others
        far = columns(masked_products(columns(q), columns(k), others & columns(present).mT))  # [R, H, G, S, G]

        weights = torch.cat([near, far], -1).softmax(-1).to(v.dtype)
        near, far = weights.split([near.shape[-1], blocks], -1)
        return join_blocks(near @ with_neighbours(v, causal) + columns(columns(far) @ columns(v)), length)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, packing: Packing) -> tuple[Tensor, KVCache]:
        first, stride = packing.common_start or 0, self.stride
        state, *cached, _ = state.append(k, v, packing)
        length = first + q.shape[2]
        # The distances that a token attends to: its window, then every S-th token before it.
        window = torch.arange(min(stride, length), device=q.device)
        distances = torch.cat([window, torch.arange(stride, max(stride, length), stride, device=q.device)])
        at_a_time = max(1, GATHERED // max(1, len(distances)))
        outputs = []
        for new in q.split(at_a_time, 2):
            queries = torch.arange(first, first + new.shape[2], device=q.device)
            first += new.shape[2]
            reads = queries[:, None] - distances  # [L, K]
            keys, values = (x[:, :, reads.clamp(min=0)].to(acc_dtype(q)) for x in cached)  # [R, H, L, K, h]
            scores = masked_products(new[..., None, :].to(keys.dtype), keys, (reads >= 0)[:, None, :])
            outputs.append((scores.softmax(-1) @ values)[..., 0, :])
        return torch.cat(outputs, 2), state


@dataclass(eq=False)
class LongformerState(StreamState):
    """The state of causal streams, which stops growing after W + n tokens.

    Attributes:
        k_global, v_global: [B, H, up to n, h] of the first n tokens.
        k, v: [B, H, up to W - 1, h] of the last W - 1 tokens.
    """

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

    Source: "Longformer: The Long-Document Transformer" (arXiv 2004.05150), with the same projections for global tokens and
    without dilation.
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
        length = q.shape[-2]
        window, n_global = max(1, min(self.window, length)), min(self.n_global, length)  # larger ones also cover everything
        return attend_near_and_first(q, k, v, real_tokens(q, real), window, window, n_global, self.causal)

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


def _hash(x: Tensor) -> Tensor:
    """Hash numbers below 2^32 to numbers below 2^32, int64 -> int64; no product exceeds 2^63."""
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


def _take(x: Tensor, chosen: Tensor) -> Tensor:
    """Gather the tokens of the chosen blocks: [R, H, G, S, f] and int64 [R, H, G, r] or [H, G, r] -> [R, H, G, r S, f]."""
    chosen = chosen.expand(len(x), -1, -1, -1)
    index = chosen.flatten(2)[..., None, None].expand(-1, -1, -1, *x.shape[3:])
    taken: Tensor = x.gather(2, index).unflatten(2, chosen.shape[2:]).flatten(-3, -2)
    return taken


def _read(cache: Tensor, places: Tensor) -> Tensor:
    """Gather the tokens of a cache [R, H, T, h] at positions [H, K], clamped to the last token -> [R, H, K, h]."""
    index = places.clamp(max=cache.shape[2] - 1)[..., None].expand(len(cache), -1, -1, cache.shape[-1])
    return cache.gather(2, index)


class BigBird(MultiHeadMixer):
    """BigBird: near, global and random blocks.

    The seeds of the random blocks, one for each head, are drawn when the layer is constructed; they are saved with the weights,
    but not learned.

    Args:
        block_size: S, the number of tokens in a block.
        n_global: n, the number of global blocks at the start: all tokens attend to them and, unless the layer is causal, they
            attend to all tokens.
        n_random: r, the number of random blocks that a block attends to.
        **options: the options of `MultiHeadMixer`.

    Source: "Big Bird: Transformers for Longer Sequences" (arXiv 2007.14062), with global tokens from the sequence itself: here,
    its first blocks.
    """

    name = "bigbird"

    def __init__(
        self, d_model: int, *, block_size: int = 64, n_global: int = 2, n_random: int = 3, **options: Unpack[HeadOptions]
    ) -> None:
        super().__init__(d_model, **options)
        check_positive(block_size=block_size, n_global=n_global, n_random=n_random)
        self.block_size = block_size
        self.n_global = n_global
        self.n_random = n_random
        self.seeds: Tensor
        device = factory(options).get("device")
        self.register_buffer("seeds", torch.empty(self.n_heads, dtype=torch.long, device=device))
        self.init_own()

    def init_own(self) -> None:
        self.seeds.random_(2**32)

    def choose(self, block: Tensor, n_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The random blocks of query blocks, int64 [..., G], each of which can attend to the first `n_blocks`, int64 [..., G].

        Their indices, int64 [..., H, G, r], and whether they exist, bool [..., H, G, r]; if not, the index is 0.
        """
        part = torch.arange(self.n_random, device=block.device)
        block, n_blocks = block[..., None, :, None], n_blocks[..., None, :, None]
        near_start = (block - 1).clamp(min=self.n_global)
        near = (torch.minimum(block + 2, n_blocks) - near_start).clamp(min=0)
        others = (n_blocks - self.n_global - near).clamp(min=0)
        start, stop = part * others // self.n_random, (part + 1) * others // self.n_random
        drawn = _hash(_hash(block * self.n_random + part) ^ self.seeds[:, None, None]) % (stop - start).clamp(min=1)
        chosen = self.n_global + start + drawn
        chosen = torch.where(chosen >= near_start, chosen + near, chosen)
        there = (stop > start).expand_as(chosen)
        return chosen * there, there

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend with (3 + n + r) S scores per token, (2 + n + r) S if causal: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        length, causal, real = q.shape[-2], self.causal, real_tokens(q, real)
        block_size = max(1, min(self.block_size, length))  # a larger block would only be padded
        present = cut_blocks(real[:, None, :, None], block_size)  # [R or 1, 1, G, S, 1]

        def at_random(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            block = torch.arange(q.shape[2], device=q.device)
            n_blocks = block + 1 if causal else present.flatten(3).any(-1).sum(-1).expand(-1, len(block))  # [G] or [R or 1, G]
            chosen, there = self.choose(block, n_blocks)  # [R or none, H, G, r]
            there = there.repeat_interleave(block_size, -1)[..., None]
            visible = (_take(present.expand(-1, q.shape[1], -1, -1, -1), chosen) & there).mT
            return masked_products(q, _take(k, chosen), visible), _take(v, chosen)

        n_first = min(self.n_global * block_size, length)
        return attend_near_and_first(q, k, v, real, block_size, 2 * block_size, n_first, causal, at_random)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, packing: Packing) -> tuple[Tensor, KVCache]:
        block_size, position, compute = self.block_size, packing.common_start or 0, acc_dtype(q)
        state, *cached, _ = state.append(k, v, packing)
        outputs = [v[:, :, :0].to(compute)]
        for new, first, last in open_chunk_pieces(position, q.shape[2], block_size):
            start = position + new.start - first  # of the block
            near_start = max(0, start - block_size)
            near, of_global = slice(near_start, start + last), slice(0, min(self.n_global * block_size, near_start))
            block = torch.full((1,), start // block_size, device=q.device)
            chosen, there = self.choose(block, block + 1)  # [H, 1, r]
            at_random = (chosen[..., None] * block_size + torch.arange(block_size, device=q.device)).flatten(1)  # [H, r S]
            keys, values = (
                [part.to(compute) for part in (x[:, :, near], x[:, :, of_global], _read(x, at_random))] for x in cached
            )
            queries = q[:, :, new].to(compute)
            places = torch.arange(near_start, start + last, device=q.device)
            visible = places <= places[len(places) - last + first :, None]
            scores = (
                masked_products(queries, keys[0], visible),
                scaled_products(queries, keys[1]),
                masked_products(queries, keys[2], there.repeat_interleave(block_size, -1)),
            )
            outputs.append(joint_softmax(list(zip(scores, values, strict=True))))
        return torch.cat(outputs, 2), state


class ExplicitTopK(MultiHeadMixer):
    """Explicit top-k: softmax over the k largest scores.

    Two forms of the layer agree up to rounding, unless rounding changes which scores are the k largest.

    Args:
        n_largest: k, the number of tokens that each token attends to in each head.
        **options: the options of `MultiHeadMixer`.

    Source: "Explicit Sparse Transformer: Concentrated Attention Through Explicit Selection" (arXiv 1912.11637).
    """

    name = "explicit-topk"
    any_positions = True

    def __init__(self, d_model: int, *, n_largest: int = 8, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(n_largest=n_largest)
        self.n_largest = n_largest

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        visible = real_tokens(q, real)[:, None, None, :]
        if self.causal:  # padding comes after the real tokens
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return self._read_largest(q, k, v, visible)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, state: KVCache, packing: Packing) -> tuple[Tensor, KVCache]:
        state, keys, values, visible = append(state, k, v, packing)
        at_a_time = max(1, COMPARED // max(1, keys.shape[2]))
        values = values.to(acc_dtype(q))
        outputs = [
            self._read_largest(new, keys, values, seen)
            for new, seen in zip(q.split(at_a_time, 2), visible.split(at_a_time, -2), strict=True)
        ]
        return torch.cat(outputs, 2), state

    def _read_largest(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Attend to the largest scores: q [..., Q, h], k, v [..., K, h], visible bool [..., Q or 1, K] -> [..., Q, h]."""
        dtype = acc_dtype(q)  # in a lower precision, different scores could become equal
        scores = masked_products(q.to(dtype), k.to(dtype), visible)
        if self.n_largest < scores.shape[-1]:
            # Where fewer than k keys are visible, the k-th largest score is that of masked keys, whose weight is zero.
            threshold = scores.detach().topk(self.n_largest, -1).values[..., -1:]
            scores = scores.masked_fill(scores < threshold, torch.finfo(dtype).min)
        return scores.softmax(-1).to(v.dtype) @ v
