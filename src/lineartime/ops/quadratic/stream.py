"""Quadratic attention of streams, with the keys and values of all earlier tokens in a cache.

Shapes: B streams, N new tokens, T earlier tokens, s query/key width, e value width.
"""

from typing import Literal

from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import Activation
from lineartime.ops.cache import KVCache, KVStreams
from lineartime.ops.checks import check_continues
from lineartime.ops.precision import output_dtype
from lineartime.ops.quadratic.blocked import attend_visible
from lineartime.ops.quadratic.inputs import QuadraticOptions


def quadratic_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KVCache,
    *,
    bias: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Literal["count"] | int = "count",
) -> tuple[Tensor, KVCache]:
    """Continue a causal sequence by N tokens; the outputs equal those of one causal `quadratic_attention` over everything.

    Args:
        q, k, v: [B, N, s], [B, N, s], [B, N, e] of the new tokens; further leading dimensions may be heads.
        state: what came before; it is not changed.
        bias: [N, T + N], the rows of the new tokens.
        activation, normalization: as for `quadratic_attention`.

    Returns:
        The new tokens' outputs [B, N, e] and the new state.

    Raises:
        ArgumentError: if shapes do not match, the activation is unknown, or the normalization is neither "count" nor a number.
    """
    options = QuadraticOptions(causal=True, activation=activation, normalization=normalization)
    if isinstance(normalization, str) and normalization != "count":
        raise ArgumentError("normalization", f"is {normalization!r}, but a stream needs 'count', or a fixed n.")
    check_continues(k=(k, state.k), v=(v, state.v), q=(q, state.k))
    state = state.append(k, v)
    out = _attend(q, state.k, state.v, state.visible(q.shape[-2]), bias, options)
    return out.to(output_dtype(v, out.dtype)), state


def quadratic_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    streams: KVStreams,
    *,
    bias: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Literal["count"] | int = "count",
) -> Tensor:
    """Continue streams at different positions by one token each, and update `streams` in place.

    Args:
        q, k, v: [B, 1, s], [B, 1, s], [B, 1, e]; further dimensions after the first may be heads.
        streams: what came before.
        bias: [B, T], the row of each new token for the T tokens of the longest stream, including the new one.
        activation, normalization: as for `quadratic_attention_extend`.

    Returns:
        The outputs, [B, 1, e].
    """
    options = QuadraticOptions(causal=True, activation=activation, normalization=normalization)
    keys, values, visible = streams.append(k, v)
    shape = (len(visible), *[1] * (q.dim() - 2), visible.shape[1])  # the same for all heads
    out = _attend(q, keys, values, visible.view(shape), None if bias is None else bias.view(shape), options)
    return out.to(output_dtype(v, out.dtype))


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, bias: Tensor | None, options: QuadraticOptions) -> Tensor:
    n = options.published_length(0, None)
    return attend_visible(q, k, v, visible=visible, bias=bias, activation=options.activation, published_length=n)
