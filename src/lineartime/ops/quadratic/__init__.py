"""Quadratic gated attention, the attention of GAU and FLASH-Quad: every token attends to every visible token of its document.

    reference.py   the definition, one query at a time
    blocked.py     plain PyTorch, on any device
    cpu.py         some queries at a time, for CPUs; with cpu.cpp
    triton.py      kernels for GPUs

All of them compute the same function of (q, k, v, bias, real, options), in which every document is a row. This file checks the
arguments and chooses the form.

Shapes: B batch, T tokens, R rows, L slots of a row, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2: relu(q.k / sqrt(s) + bias)^2 / n,
with n the number of visible keys.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.batch import Batch
from lineartime.ops.checks import as_mask, check_queries_keys_values
from lineartime.ops.make_batch import check_prefix, make_batch, stream_batch
from lineartime.ops.modes import matmul_dtype, output_dtype
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic import blocked, cpu, reference, triton
from lineartime.ops.quadratic.blocked import attend_visible
from lineartime.ops.quadratic.inputs import QuadraticOptions, check_quadratic_bias
from lineartime.ops.state import KVCache

_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor | FactoredBias | None, Tensor | None, QuadraticOptions], Tensor]] = {
    "torch": blocked.attend,
    "tiled": cpu.attend,
    "triton": triton.attend,
}


def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | FactoredBias | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization | int = "count",
    backend: Backend = "auto",
) -> Tensor:
    """Attend from every token to every visible token with one head and, by default, no softmax.

    Args:
        q, k: [B, T, s] queries and keys.
        v: [B, T, e] values.
        causal: whether a token attends only to itself and earlier tokens.
        bias: [T, T], added to the scores by place in the document, or a `FactoredBias`, which needs no T x T memory.
        mask: [B, T], bool or integers 0 and 1, True for real tokens. No token attends to padding, and its outputs are zero.
        cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row. They do not attend to each other.
        prefix_lengths: int [B], or [D] with `cu_seqlens`, for causal attention: the number of real tokens at the start of each
            row, or document, that attend to each other bidirectionally. Later tokens attend causally.
        activation: the activation of the scores: "relu2" or "softmax".
        normalization: "count" divides by the number of visible keys. "paper" is the published relu(q.k / n + bias)^2, with n
            the number of real tokens of the document. An integer is a fixed n for "paper", which a causal model needs: with n
            from the current length, later tokens would change earlier outputs. Prefixes need "count" or an integer.
        backend: "torch", "tiled" (for CPUs), "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto", the
            fastest that can run.

    Returns:
        [B, T, e], with zeros where no key is visible. float16 is computed in float32.

    Raises:
        ArgumentError: if shapes do not match, the activation or normalization is unknown, or the backend is unknown or cannot
            run here.
    """
    options = QuadraticOptions(causal, activation, normalization)
    check_queries_keys_values({"q": q, "k": k}, v)
    check_quadratic_bias(bias, v.shape[1])
    check_prefix(prefix_lengths, causal)
    mask = as_mask("mask", mask, v.shape[0], v.shape[1], v.device)
    prefix = None
    if prefix_lengths is not None:
        if normalization == "paper":
            found = f"is {normalization!r}, which would use a different divisor inside and after the prefix"
            raise ArgumentError("normalization", f"{found}: give a fixed length as an integer, or use 'count'.")
        described = make_batch(v.shape, mask, cu_seqlens, prefix_lengths, device=v.device)
        assert described.in_prefix is not None
        prefix = described.unpack(described.in_prefix[..., None])

    def attend(*parts: Any) -> Tensor:
        *tensors, batch = parts
        out: Tensor = batch.by_row(of_rows, *tensors)
        return out

    def of_rows(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        *marks, real = rest
        of_tokens = [mark[..., 0] for mark in marks]
        if mask is not None:
            real = of_tokens.pop(0)
        return attend_rows(q, k, v, _of_places(bias, q.shape[1]), real, options, backend, *of_tokens)

    # The documents alone, without the mask: a bias is indexed by place, padding included.
    batch = make_batch(v.shape, None, cu_seqlens, device=v.device)
    marks = [mark for mark in (None if mask is None else mask[..., None], prefix) if mark is not None]
    return batch.by_part(attend, q, k, v, *marks)


def _of_places(bias: Tensor | FactoredBias | None, length: int) -> Tensor | FactoredBias | None:
    """The bias of the first places of a document."""
    if isinstance(bias, FactoredBias):
        return FactoredBias(bias.of_queries[:length], bias.of_keys[:length])
    return None if bias is None else bias[:length, :length]


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | FactoredBias | None,
    real: Tensor | None,
    options: QuadraticOptions,
    backend: Backend = "auto",
    prefix: Tensor | None = None,
) -> Tensor:
    """`quadratic_attention` inside a model, where the arguments are already checked and every document is a row.

    [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real`, bool [R, L], marks real tokens, or is None if all slots hold one.
    `prefix`, bool [R, L], marks the tokens of prefixes, or is None if there are none. A bias [R, L, L] differs by row, for
    which there is plain PyTorch alone.

    Raises:
        ArgumentError: if the backend is unknown or cannot run here.
    """
    by_row = isinstance(bias, Tensor) and bias.dim() == 3
    available: tuple[Backend, ...] = ("torch", "oracle") if by_row else ("torch", "tiled", "triton", "oracle")
    form = choose_backend(backend, available, v, matmul_dtype(q, k, v), options.activation)
    if form == "oracle":
        return reference.attend(q, k, v, bias, real, options, prefix)
    if prefix is not None:
        causal = attend_rows(q, k, v, bias, real, options, form)
        both_ways = attend_rows(q, k, v, bias, prefix, replace(options, causal=False), form)
        return torch.where(prefix[..., None], both_ways, causal)
    if real is None:
        return _FORMS[form](q, k, v, bias, real, options)
    q, k, v = (x.masked_fill(~real[..., None], 0.0) for x in (q, k, v))  # 0 * inf, at padding, would be NaN
    return _FORMS[form](q, k, v, bias, real, options).masked_fill(~real[..., None], 0.0)


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


quadratic_attention_oracle = partial(quadratic_attention, backend="oracle")
"""The definition of `quadratic_attention`, with the same arguments: slow, a reference for tests."""
