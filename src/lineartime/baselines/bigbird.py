"""BigBird: attention to near, global and random blocks.

Shapes: R rows (one for each document or stream), H heads, L tokens of the longest row, h head width,
S block size, G blocks of a row, n global blocks, r random blocks.
Source: "Big Bird: Transformers for Longer Sequences" (arXiv 2007.14062), with global tokens from the sequence itself: here, its
first blocks.

    o[i] = sum over j in A(i) of softmax over j (q[i].k[j] / sqrt(h)) v[j]
    A(i) = tokens of i's own block g and of the blocks g - 1 and g + 1, of the first n blocks, and of r random blocks;
           all tokens if g is one of the first n; causal: those of them with j <= i

Random blocks are chosen from the blocks that are neither near nor global. These candidates, in order, are cut into r equal
parts, and a hash of (head, g, part) chooses one block of each part. The candidates of a causal block end before it, so its
random blocks do not depend on later tokens.
"""

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.baselines.blocks import (
    cut_blocks,
    join_blocks,
    joint_softmax,
    masked_products,
    open_chunk_pieces,
    real_tokens,
    scaled_products,
    with_global_queries,
    with_neighbours,
)
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.layers.dense import factory
from lineartime.ops.checks import check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing
from lineartime.ops.state import KVCache


def bigbird_attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, random_blocks: list[list[int]], *, block_size: int, n_global: int, causal: bool
) -> Tensor:
    """The definition for one head of one document: q, k, v [T, h] and the random blocks of each block -> [T, h]. Slow."""
    rows = []
    for i in range(len(q)):
        g = i // block_size
        blocks = {g - 1, g, g + 1, *range(n_global), *random_blocks[g]}
        reads = [j for j in range(len(k)) if (j // block_size in blocks or g < n_global) and (j <= i or not causal)]
        rows.append((k[reads] @ q[i] / q.shape[-1] ** 0.5).softmax(0) @ v[reads])
    return torch.stack(rows)


def choose_blocks(seeds: Tensor, block: Tensor, n_blocks: Tensor, *, n_global: int, n_random: int) -> tuple[Tensor, Tensor]:
    """Choose the random blocks of every block.

    Args:
        seeds: int64 [H], below 2^32.
        block: int64 [..., G], the indices of the query blocks.
        n_blocks: int64 [..., G], the number of blocks that each of them can attend to; if causal, those up to itself.
        n_global: n.
        n_random: r.

    Returns:
        The indices of the blocks, int64 [..., H, G, r], and whether they exist, bool [..., H, G, r]; if not, the index is 0.
    """
    part = torch.arange(n_random, device=block.device)
    block, n_blocks = block[..., None, :, None], n_blocks[..., None, :, None]
    near_start = (block - 1).clamp(min=n_global)
    near = (torch.minimum(block + 2, n_blocks) - near_start).clamp(min=0)
    others = (n_blocks - n_global - near).clamp(min=0)
    start, stop = part * others // n_random, (part + 1) * others // n_random
    drawn = _hash(_hash(block * n_random + part) ^ seeds[:, None, None]) % (stop - start).clamp(min=1)
    chosen = n_global + start + drawn
    chosen = torch.where(chosen >= near_start, chosen + near, chosen)
    there = (stop > start).expand_as(chosen)
    return chosen * there, there


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
        """The random blocks of each head: see `choose_blocks`."""
        return choose_blocks(self.seeds, block, n_blocks, n_global=self.n_global, n_random=self.n_random)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend with (3 + n + r) S scores per token, (2 + n + r) S if causal: q, k, v [R, H, L, h] -> [R, H, L, h]."""
        length, causal, real = q.shape[-2], self.causal, real_tokens(q, real)
        block_size = max(1, min(self.block_size, length))  # a larger block would only be padded
        first_tokens = min(self.n_global * block_size, length)
        tokens = torch.arange(length, device=q.device)
        q_blocks, k_blocks, v_blocks = (cut_blocks(x, block_size) for x in (q, k, v))  # [R, H, G, S, h]
        place = cut_blocks(tokens[:, None], block_size)  # [G, S, 1]
        present = cut_blocks(real[:, None, :, None], block_size)  # [R or 1, 1, G, S, 1]

        local = real & (tokens >= first_tokens)  # global tokens are not counted twice
        near_keys = cut_blocks(local[:, None, :, None], block_size)
        visible = with_neighbours(near_keys, causal).mT
        if causal:
            visible = visible & (with_neighbours(place, causal).mT <= place)
        near = masked_products(q_blocks, with_neighbours(k_blocks, causal), visible)

        visible = real[:, None, None, None, :first_tokens]
        if causal:
            visible = visible & (tokens[:first_tokens] <= place)
        of_global = masked_products(q_blocks, k[..., None, :first_tokens, :], visible)

        block = torch.arange(len(place), device=q.device)
        n_blocks = block + 1 if causal else present.flatten(3).any(-1).sum(-1).expand(-1, len(place))  # [G] or [R or 1, G]
        chosen, there = self.choose(block, n_blocks)  # [R or none, H, G, r]
        there = there.repeat_interleave(block_size, -1)[..., None]
        visible = (_take(present.expand(-1, q.shape[1], -1, -1, -1), chosen) & there).mT
        at_random = masked_products(q_blocks, _take(k_blocks, chosen), visible)

        out = joint_softmax(
            [
                (near, with_neighbours(v_blocks, causal)),
                (of_global, v[..., None, :first_tokens, :]),
                (at_random, _take(v_blocks, chosen)),
            ]
        )
        out = join_blocks(out, length)
        # In a causal row, the first blocks already contain all tokens before them.
        return out if causal else with_global_queries(out, q, k, v, first_tokens, real)

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
