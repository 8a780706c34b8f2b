"""Quadratic attention of streams, with the keys and values of all earlier tokens in a cache.

Shapes: B streams, N new tokens, K places of the cache, s query/key width, e value width.
"""

from collections.abc import Callable

from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.batch import Batch
from lineartime.ops.cache import KVCache
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.precision import output_dtype
from lineartime.ops.quadratic.blocked import attend_visible
from lineartime.ops.quadratic.inputs import QuadraticOptions


def quadratic_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KVCache,
    *,
    batch: Batch | None = None,
    bias: Callable[[int], Tensor | None] | Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization | int = "count",
) -> tuple[Tensor, KVCache]:
    """Continue causal sequences by N tokens; the outputs equal those of one causal `quadratic_attention` over everything.

    Args:
        q, k, v: [B, N, s], [B, N, s], [B, N, e] of the new tokens; further dimensions after the first may be heads.
        state: what came before; it is consumed.
        batch: the new tokens; None if all of them are real.
        bias: the rows of the new tokens, [N, K] or [B, N, K], or a function of K that computes them.
        activation, normalization: as for `quadratic_attention`.

    Returns:
        The new tokens' outputs [B, N, e] and the new state.

    Raises:
        ArgumentError: if shapes do not match, the activation is unknown, or the normalization is neither "count" nor a number.
    """
    options = QuadraticOptions(causal=True, activation=activation, normalization=normalization)
    if isinstance(normalization, str) and normalization != "count":
        raise ArgumentError("normalization", f"is {normalization!r}, but a stream needs 'count', or a fixed n.")
    batch = batch or stream_batch(state.position, (len(q), q.shape[-2]))
    state, keys, values, visible = state.append(k, v, batch)
    rows = bias(keys.shape[-2]) if callable(bias) else bias
    if visible.dim() == 3:  # the same for all heads
        heads = [1] * (q.dim() - 3)
        visible = visible.view(len(visible), *heads, *visible.shape[1:])
        rows = rows if rows is None or rows.dim() == 2 else rows.view(len(rows), *heads, *rows.shape[1:])
    n = options.published_length(0, None)
    out = attend_visible(q, keys, values, visible=visible, bias=rows, activation=activation, published_length=n)
    return out.to(output_dtype(v, out.dtype)), state
