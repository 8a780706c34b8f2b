"""Linear attention: similarities are products of features, so keys and values can be summed before a query attends to them.

Shapes: T tokens, N new tokens of a stream, f features, h value width, C chunk size, G chunks; tensors may have leading
dimensions, for instance rows and heads.
Source: "Transformers are RNNs" (arXiv 2006.16236): features of queries and keys are not negative, and

    out[t] = sum over visible j of (q[t].k[j]) v[j]  /  sum over visible j of (q[t].k[j])

With rotary positions on the features (arXiv 2104.09864, eq. 19), the numerator takes rotated features and the denominator plain
ones, so that the denominator stays a sum of nonnegative numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.checks import check_continues
from lineartime.ops.modes import acc_dtype
from lineartime.ops.state import State, in_place, writable


def exclusive_cumsum(x: Tensor, dim: int = 1) -> Tensor:
    """The cumulative sum along `dim` that excludes the current element."""
    shape = list(x.shape)
    shape[dim] = 1
    # Sizes of n - 1 would be compiled once for n = 2, and again for other n.
    return torch.cat([x.new_zeros(shape), x], dim).narrow(dim, 0, x.shape[dim]).cumsum(dim)


MIN_DIVISOR = 1e-18
"""The smallest divisor, so that a query without a similar key does not divide by zero. Its square, which occurs in the
gradient, is still nonzero in float32."""


def linear_attention_oracle(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """The definition for one head and one document, one query at a time: [T, f], [T, f], [T, h] -> [T, h]."""
    rows = []
    for t in range(len(v)):
        visible = slice(0, t + 1) if causal else slice(None)
        similarities = k[visible] @ q[t]
        rows.append(similarities @ v[visible] / similarities.sum())
    return torch.stack(rows)


CausalSums = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [..., T, f], k [..., T, f], v [..., T, h] -> sum over j <= t of (q[t].k[j]) v[j], [..., T, h]."""


def chunked_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sum by chunks: products inside a chunk, and one f x h state for everything before it. Linear in T; best for training."""
    return continued_sums(q, k, v, None)[0]


def prefix_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sum by a prefix sum over tokens, as in the published Performer. It stores T states of f x h, which makes it slow."""
    states = (k[..., None] * v[..., None, :]).to(acc_dtype(v)).cumsum(-3)
    return (q[..., None, :] @ states.to(q.dtype)).squeeze(-2)


def matmul_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sum by all T x T products, with future ones set to zero: quadratic in T, but only matrix products."""
    return (q @ k.mT).tril() @ v


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    real: Tensor | None = None,
    causal_sums: CausalSums = chunked_sums,
    plain: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend in time linear in T.

    Args:
        q, k: [..., T, f] features of queries and keys, not negative.
        v: [..., T, h] values.
        causal: whether a token attends only to itself and earlier tokens.
        real: bool, broadcastable to [..., T], True for real keys; no query attends to the others.
        causal_sums: how causal sums are computed: `chunked_sums`, `prefix_sums` or `matmul_sums`.
        plain: features of queries and keys for the denominator, if q and k are rotated; None to use q and k.

    Returns:
        [..., T, h], with zeros where no key is visible. States are summed in float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: if widths or numbers of tokens do not match.
    """
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or (causal and q.shape[-2] != k.shape[-2]):
        shapes = f"q {list(q.shape)} and v {list(v.shape)}"
        raise ArgumentError("k", f"has shape {list(k.shape)}, but must be [..., T, f] to match {shapes}.")
    if torch.float16 in (q.dtype, k.dtype, v.dtype):  # sums of as few as 256 squares of 16 are beyond its range
        wide = None if plain is None else (plain[0].float(), plain[1].float())
        out = linear_attention(q.float(), k.float(), v.float(), causal=causal, real=real, causal_sums=causal_sums, plain=wide)
        return out.to(v.dtype)
    if real is not None:
        k, plain = _without(~real[..., None], k, plain)
    sums = causal_sums if causal else _total
    if plain is None:
        return normalized(sums(q, k, with_ones(v)))
    return normalized(torch.cat([sums(q, k, v), sums(*plain, torch.ones_like(v[..., :1]))], -1))


def _without(padding: Tensor, k: Tensor, plain: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Features of keys with zeros where `padding` [..., T, 1] is True, so that no query reads them."""
    return k.masked_fill(padding, 0.0), None if plain is None else (plain[0], plain[1].masked_fill(padding, 0.0))


def with_ones(v: Tensor) -> Tensor:
    """Append a one to values, [..., h] -> [..., h + 1]; summed like a value, it becomes the normaliser."""
    return F.pad(v, (0, 1), value=1.0)


def normalized(sums: Tensor) -> Tensor:
    """Divide sums of values by the sum of ones in their last place: [..., h + 1] -> [..., h]."""
    return sums[..., :-1] / sums[..., -1:].clamp(min=MIN_DIVISOR)


def _total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.mT @ v)


def continued_sums(q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, chunk_size: int = 128) -> tuple[Tensor, Tensor]:
    """The causal sums by chunks that continue a state [..., f, h] (None for the beginning), and the new state."""
    length = q.shape[-2]
    chunk_size = max(1, min(chunk_size, length))  # a larger chunk would only be padded
    spare = max(1, -(-length // chunk_size)) * chunk_size - length  # empty slots add nothing: their features are zero
    q, k, v = (F.pad(x, (0, 0, 0, spare)).unflatten(-2, (-1, chunk_size)) for x in (q, k, v))
    states = (k.mT @ v).to(acc_dtype(v))  # [..., G, f, h]
    start = torch.zeros_like(states[..., :1, :, :]) if before is None else before[..., None, :, :]
    earlier = start + exclusive_cumsum(states, dim=-3)
    sums = (q @ k.mT).tril() @ v + q @ earlier.to(q.dtype)
    return sums.flatten(-3, -2)[..., :length, :], earlier[..., -1, :, :] + states[..., -1, :, :]


@dataclass(eq=False)
class LinearState(State):
    """What causal streams remember.

    Attributes:
        position: int64 [B], the number of tokens that each stream has read.
        summary: [B, H, f, h + 1], the sum of k (v, 1)^T over them, in float32 or better. If features are rotated, the ones are
            summed with plain features.
    """

    position: Tensor
    summary: Tensor


def linear_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    counts: Tensor | None = None,
    plain: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, LinearState]:
    """Continue causal sequences by N tokens: features [B, H, N, f] and values [B, H, N, h] -> [B, H, N, h] and the state.

    Args:
        q, k, v: of the new tokens.
        state: what came before; it is consumed.
        counts: int64 [B], the number of tokens that are real, which come first; None if all are.
        plain: features of queries and keys for the denominator, if q and k are rotated.

    Raises:
        ArgumentError: if they do not have the sizes of the state.
    """
    check_continues(v=(v, state.summary[..., :-1]), k=(k, state.summary.mT))
    new = v.shape[-2]
    if counts is not None:
        padding = (torch.arange(new, device=k.device) >= counts[:, None])[:, None, :, None]
        k, plain = _without(padding, k, plain)
    if new == 1 and in_place(q, k, v, state.summary):
        position, summary = writable(state.position), writable(state.summary)
        position += 1 if counts is None else counts
        return _step(q, k, v, summary, plain), LinearState(position, summary)
    if plain is None:
        sums, summary = continued_sums(q, k, with_ones(v), state.summary)
    else:
        numerator, of_values = continued_sums(q, k, v, state.summary[..., :-1])
        denominator, of_ones = continued_sums(*plain, torch.ones_like(v[..., :1]), state.summary[..., -1:])
        sums, summary = torch.cat([numerator, denominator], -1), torch.cat([of_values, of_ones], -1)
    return normalized(sums), LinearState(state.position + (new if counts is None else counts), summary)


def _step(q: Tensor, k: Tensor, v: Tensor, summary: Tensor, plain: tuple[Tensor, Tensor] | None) -> Tensor:
    """One token of each stream; `summary` is updated in place."""
    q, k, v = (x.to(summary.dtype) for x in (q, k, v))
    if plain is None:
        summary += k.mT @ with_ones(v)
        return normalized(q @ summary)
    plain_q, plain_k = (x.to(summary.dtype) for x in plain)
    summary += torch.cat([k.mT @ v, plain_k.mT], -1)
    return normalized(torch.cat([q @ summary[..., :-1], plain_q @ summary[..., -1:]], -1))
