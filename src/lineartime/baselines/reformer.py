"""Reformer: attention among tokens that a random hash puts into the same bucket, with one vector for query and key.

Shapes: N tokens, B streams, T tokens of a stream, H heads, h head width, n buckets, P rounds of hashing, C chunk size,
G chunks of a round, R rows (one for each document or stream), L tokens of the longest row.
Source: "Reformer: The Efficient Transformer" (arXiv 2001.04451), with chunks that are cut inside each bucket.

    bucket(i) = argmax of [x[i] W; -x[i] W]        W random [h, n / 2], another one for every round; x before rotary positions
    k[j] = sqrt(h) q[j] / |q[j]|                   q = rope(x)
    o[i] = sum over j in A(i) of softmax over j (s[i, j]) v[j]        s[i, j] = q[i].k[j] / sqrt(h), but s[i, i] = -100,000

    A(i) = the tokens that, in any round, are in i's bucket and in i's chunk or the previous one, where the tokens of a
           bucket, in order, are cut into chunks of C; causal: those with j <= i

The published chunks are cut from all tokens sorted by bucket. Their boundaries depend on the number of tokens in earlier
buckets, including future tokens, so a causal token receives information from the future. Chunks inside a bucket do not leak.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.baselines.blocks import StreamState, exclusive_cumsum, masked_products
from lineartime.layers.attention import HeadOptions, MultiHeadMixer
from lineartime.layers.dense import factory
from lineartime.ops.checks import check_even, check_positive
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing

SELF_SCORE = -1e5
"""The published score of a token with itself: it attends to itself only if there is no other token to attend to."""

COMPARED = 2**20
"""The number of pairs of a new and a cached token that a stream compares at a time; bounds the memory for a long prompt."""


def reformer_buckets(x: Tensor, directions: Tensor) -> Tensor:
    """The bucket of every vector in every round: [R, H, L, h] and directions [H, P, h, n / 2] -> int64 [R, H, P, L]."""
    dtype = acc_dtype(x)
    along = x.detach()[:, :, None].to(dtype) @ directions.to(dtype)  # [R, H, P, L, n / 2]
    return torch.cat([along, -along], -1).argmax(-1)


def _slots(buckets: Tensor, n_buckets: int, chunk_size: int) -> Tensor:
    """The slot of each token, where every bucket starts a new chunk: int64 [..., L] -> [..., L]."""
    sizes = buckets.new_zeros(*buckets.shape[:-1], n_buckets).scatter_add(-1, buckets, torch.ones_like(buckets))
    order = buckets.argsort(dim=-1, stable=True)
    place = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(order)
    rank = torch.empty_like(order).scatter(-1, order, place) - exclusive_cumsum(sizes, -1).gather(-1, buckets)
    first_chunk = exclusive_cumsum((sizes + chunk_size - 1) // chunk_size, -1)
    return first_chunk.gather(-1, buckets) * chunk_size + rank


def _keys(q: Tensor) -> Tensor:
    """The keys [..., h]: queries scaled to length sqrt(h), computed in float32 or better."""
    # A query shorter than 1e-6 keeps a shorter key, because the gradient of its direction would grow without bound.
    keys: Tensor = F.normalize(q.to(acc_dtype(q)), dim=-1, eps=1e-6) * q.shape[-1] ** 0.5
    return keys.to(q.dtype)


@dataclass(eq=False)
class ReformerState(StreamState):
    """The state of causal streams: a cache of all T tokens so far.

    Attributes:
        k: [B, H, T, h], the keys.
        v: [B, H, T, h], the values.
        buckets: int64 [B, H, P, T], the bucket of every token in every round.
        ranks: int64 [B, H, P, T], how many earlier tokens are in the same bucket.
    """

    k: Tensor
    v: Tensor
    buckets: Tensor
    ranks: Tensor


def _extend_slice(q: Tensor, v: Tensor, buckets: Tensor, state: ReformerState, chunk_size: int) -> tuple[Tensor, ReformerState]:
    """Compare all new tokens with the whole cache, with L T scores."""
    read = state.k.shape[2]
    tokens = torch.arange(read + q.shape[2], device=q.device)
    new = tokens[read:, None]
    all_buckets = torch.cat([state.buckets, buckets], -1)
    together = (buckets[..., None] == all_buckets[..., None, :]) & (tokens <= new)  # [R, H, P, L, T]
    ranks = together.sum(-1) - 1
    state = ReformerState(
        state.position + q.shape[2],
        torch.cat([state.k, _keys(q).to(state.k.dtype)], 2),
        torch.cat([state.v, v.to(state.v.dtype)], 2),
        all_buckets,
        torch.cat([state.ranks, ranks], -1),
    )
    near = ranks[..., None] // chunk_size - 1 <= state.ranks[..., None, :] // chunk_size
    dtype = acc_dtype(q)
    scores = masked_products(q.to(dtype), state.k.to(dtype), (together & near).any(2))
    return scores.masked_fill(tokens == new, SELF_SCORE).softmax(-1) @ state.v.to(dtype), state


class Reformer(MultiHeadMixer):
    """Reformer: attention inside buckets of a hash.

    The hash is drawn when the layer is constructed; it is saved with the weights, but not learned. Two forms of the layer agree
    up to rounding, unless rounding moves a token to another bucket.

    Args:
        n_buckets: n, the number of buckets of a hash, which must be even.
        n_rounds: P, the number of hashes: two tokens that one hash separates may share a bucket in another.
        chunk_size: C, the size of the chunks of a bucket; a token attends to its own chunk and the previous one.
        **options: the options of `MultiHeadMixer`; rotary positions are applied after hashing.

    The published model also has reversible blocks, which this layer leaves out.
    """

    name = "reformer"
    n_maps = 2

    def __init__(
        self, d_model: int, *, n_buckets: int = 8, n_rounds: int = 2, chunk_size: int = 64, **options: Unpack[HeadOptions]
    ) -> None:
        super().__init__(d_model, **options)
        check_positive(n_buckets=n_buckets, n_rounds=n_rounds, chunk_size=chunk_size)
        check_even("each hash direction defines two buckets", n_buckets=n_buckets)
        self.n_buckets = n_buckets
        self.chunk_size = chunk_size
        self.n_rounds = n_rounds
        self.directions: Tensor
        directions = torch.empty(self.n_heads, n_rounds, self.head_dim, n_buckets // 2, **factory(options))
        self.register_buffer("directions", directions)
        self.init_own()

    def init_own(self) -> None:
        nn.init.normal_(self.directions)

    def rotate(self, q: Tensor, k: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        """The shared query/key vectors, [N, H, h], rotated by their positions, and the same vectors unrotated."""
        return packing.rotate(q) if self.rope else q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """Attend inside buckets, with 2 C scores per token and round: q, k, v [R, H, L, h] -> [R, H, L, h]; k is hashed."""
        length, n_buckets, causal, buckets = q.shape[-2], self.n_buckets, self.causal, reformer_buckets(k, self.directions)
        chunk_size = max(1, min(self.chunk_size, length))  # a larger chunk never fills up
        # An upper bound that needs no device sync: at most the last chunk of a bucket is not full.
        n_slots = (-(-length // chunk_size) + n_buckets) * chunk_size
        slots = _slots(buckets, n_buckets, chunk_size)  # [R, H, P, L]
        cells = (slots // chunk_size + buckets)[..., None]  # numbers the chunks, skipping a number between two buckets
        slots = slots[..., None]

        def chunked(x: Tensor) -> Tensor:
            """[R, H, P, L, f], or a tensor that expands to it -> [R, H, P, G, C, f], with zeros in empty slots."""
            index = slots.expand(*slots.shape[:-1], x.shape[-1])
            empty = x.new_zeros(*slots.shape[:-2], n_slots, x.shape[-1])
            chunks: Tensor = empty.scatter(-2, index, x.expand_as(index)).unflatten(-2, (-1, chunk_size))
            return chunks

        def readable(x: Tensor) -> Tensor:
            """Concatenate every chunk with the previous one: [..., G, C, f] -> [..., G, 2 C, f]."""
            return torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)), x], -2)

        def unchunked(x: Tensor) -> Tensor:
            """[R, H, P, G, C, f] -> [R, H, P, L, f]."""
            return x.flatten(-3, -2).gather(-2, slots.expand(*slots.shape[:-1], x.shape[-1]))

        token = chunked(torch.arange(length, device=q.device)[:, None])
        bucket = buckets + 1  # empty slots and padding get a bucket of their own: 0
        if real is not None:
            bucket = bucket * real[:, None, None, :]
        bucket = chunked(bucket[..., None])
        visible = bucket == readable(bucket).mT  # [R, H, P, G, C, 2 C]
        if causal:
            visible = visible & (token >= readable(token).mT)
        itself = token == readable(token).mT

        # A pair that meets in several rounds counts once: each round has an equal share (equation 4 and what follows it).
        rounds = torch.zeros_like(visible, dtype=torch.int32)
        for cell in cells.unbind(2):
            behind = chunked(cell[:, :, None])
            behind = behind - readable(behind).mT
            rounds += (behind == 0) | (behind == 1)
        keys = readable(chunked(_keys(q)[:, :, None]))
        scores = masked_products(chunked(q[:, :, None]), keys, visible)
        scores = (scores - rounds.clamp(min=1).to(scores.dtype).log()).masked_fill(itself & visible, SELF_SCORE)
        weights = scores.softmax(-1)
        # The logsumexp, from the largest weight, exp(largest score - logsumexp), because exp is slow where it underflows.
        log_sum = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        attended = weights.to(v.dtype) @ readable(chunked(v[:, :, None]))
        # The softmax over all rounds is the mean of the softmax of each round, weighted by their sums of exponentials.
        share = unchunked(log_sum).softmax(2)
        return (share * unchunked(attended)).sum(2).to(v.dtype)

    def attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, state: ReformerState, packing: Packing
    ) -> tuple[Tensor, ReformerState]:
        start, buckets = packing.common_start or 0, reformer_buckets(k, self.directions)
        keys, values = state.k[:, :, :start], state.v[:, :, :start]
        state = ReformerState(state.position, keys, values, state.buckets[..., :start], state.ranks[..., :start])
        outputs = []
        at_a_time = max(1, COMPARED // max(1, start + q.shape[2]))
        for new in zip(q.split(at_a_time, 2), v.split(at_a_time, 2), buckets.split(at_a_time, 3), strict=True):
            out, state = _extend_slice(*new, state, self.chunk_size)
            outputs.append(out)
        return torch.cat(outputs, 2), state

    def init_own_state(self, batch_size: int) -> ReformerState:
        empty = self.empty_cache(batch_size)
        no_buckets = self.directions.new_zeros(batch_size, *self.directions.shape[:2], 0, dtype=torch.long)
        return ReformerState(self.first_position(batch_size), empty, empty, no_buckets, no_buckets)
