"""Quadratic gated attention, the attention of GAU and FLASH-Quad: every token reads every visible token.

Shapes: B batch, T tokens, N new tokens of a stream, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2: relu(q.k / sqrt(s) + bias)^2 / n,
with n the number of visible keys.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lineartime.ops import tiled_quadratic
from lineartime.ops.activations import (
    ACTIVATIONS,
    NORMALIZATIONS,
    Activation,
    Normalization,
    attention_weights,
    attention_weights_oracle,
    check_choice,
)
from lineartime.ops.backends import Backend, choose_backend
from lineartime.ops.layout import by_document, check_tokens
from lineartime.ops.positions import FactoredBias
from lineartime.ops.precision import common_dtype, matmul_dtype, output_dtype, without_autocast

# 1. The definition ----------------------------------------------------------------------------------------------------


def quadratic_attention_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization | int = "count",
) -> Tensor:
    """The definition of `quadratic_attention`, one query at a time: slow, and only there to be believed."""
    places = torch.arange(v.shape[1], device=v.device)[None, :, None].expand(v.shape[0], -1, -1)

    def document(places: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for t in range(len(v)):
            visible = [j for j in range(len(v)) if not causal or j <= t]
            weights = attention_weights_oracle(
                k[visible] @ q[t],
                None if bias is None else bias[places[t, 0], places[visible, 0]],
                d_qk=q.shape[-1],
                activation=activation,
                published_length=None
                if normalization == "count"
                else float(len(v) if normalization == "paper" else normalization),
            )
            rows.append(weights @ v[visible])
        return torch.stack(rows)

    return by_document(document, places, q, k, v, mask=mask)


# 2. The parallel form -------------------------------------------------------------------------------------------------


def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | FactoredBias | None = None,
    mask: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Normalization | int = "count",
    backend: Backend = "auto",
) -> Tensor:
    """Attend from every token to every visible token with one head and, by default, no softmax.

    Args:
        q, k: [B, T, s] queries and keys.
        v: [B, T, e] values.
        causal: whether a token reads only itself and earlier tokens.
        bias: [T, T], added to the scores, or a `FactoredBias`, which takes no memory of T x T.
        mask: bool [B, T], True for real tokens; padding is read by nobody and its outputs are zero.
        activation: "relu2", "softmax", "softmax_plus" or "laplace".
        normalization: "count" divides by the number of visible keys; "paper" is the published relu(q.k / n + bias)^2 with
            n the number of real tokens of the row; an integer is that n, fixed, which is what a causal model needs:
            n taken from the current length would let the future change the past.
        backend: "torch", "tiled" (for processors), "triton" (kernels for GPUs), "oracle" (the definition, slow), or "auto",
            the fastest that can run.

    Returns:
        [B, T, e], zeros for rows with nothing to read. float16 is computed in float32.

    Raises:
        ValueError: for shapes that do not fit together, an unknown activation or normalization, or a backend that is unknown
            or cannot run here.
    """
    _check(q, k, v, bias, mask, activation, normalization)
    compute = matmul_dtype(q, k, v)
    backend = choose_backend(backend, ("torch", "tiled", "triton", "oracle"), v, compute, activation)
    if backend == "oracle":
        return quadratic_attention_oracle(
            q,
            k,
            v,
            causal=causal,
            bias=bias.dense() if isinstance(bias, FactoredBias) else bias,
            mask=mask,
            activation=activation,
            normalization=normalization,
        )
    length, d_qk = q.shape[1:]
    if mask is not None:
        q, k, v = (x.masked_fill(~mask[..., None], 0.0) for x in (q, k, v))
    published_length: float | Tensor | None = None
    if normalization == "paper":
        published_length = float(max(length, 1)) if mask is None else mask.sum(1).clamp(min=1)[:, None, None]
    elif normalization != "count":
        published_length = float(normalization)

    if backend in ("tiled", "triton"):
        out = _attend_fused(q, k, v, causal, bias, mask, activation, published_length, backend)
        return out if mask is None else out.masked_fill(~mask[..., None], 0.0)

    # A causal block of queries need not look at keys behind it: with 8 blocks, 7/16 of the work falls away.
    block = max(256, -(-length // 8)) if causal else max(length, 1)
    outputs = []
    for start in range(0, max(length, 1), block):
        stop = min(start + block, length)
        keys = stop if causal else length
        visible = torch.ones(stop - start, keys, dtype=torch.bool, device=q.device).tril(start) if causal else None
        if mask is not None:
            visible = mask[:, None, :keys] if visible is None else visible & mask[:, None, :keys]
        out = _attend(
            q[:, start:stop],
            k[:, :keys],
            v[:, :keys],
            d_qk=d_qk,
            visible=visible,
            bias=_part(bias, start, stop, keys),
            activation=activation,
            published_length=published_length,
        )
        outputs.append(out)
    out = torch.cat(outputs, 1)
    return out if mask is None else out.masked_fill(~mask[..., None], 0.0)


def _part(bias: Tensor | FactoredBias | None, start: int, stop: int, keys: int) -> Tensor | None:
    """The bias of some queries and the first keys, [Q, K]."""
    if isinstance(bias, FactoredBias):
        return FactoredBias(bias.of_queries[start:stop], bias.of_keys[:keys]).dense()
    return None if bias is None else bias[start:stop, :keys]


def _attend_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    bias: Tensor | FactoredBias | None,
    mask: Tensor | None,
    activation: Activation,
    published_length: float | Tensor | None,
    backend: Backend,
) -> Tensor:
    """The same by a form that keeps no scores; padding is zero already, so that it adds nothing."""
    compute = matmul_dtype(q, k, v)
    result_dtype = output_dtype(v, compute)
    computed = compute if backend == "tiled" else common_dtype(q, k, v)
    q, k, v = (x.to(computed) for x in (q, k, v))
    wide = torch.promote_types(compute, torch.float32)
    batch, length, d_qk = q.shape
    row_scale = torch.ones(batch, length, dtype=wide, device=q.device)
    score_scale = d_qk**-0.5
    if isinstance(published_length, Tensor):  # another scale for each row
        if q.dtype == torch.float16:  # in which small queries would vanish
            q, k, v = (x.float() for x in (q, k, v))
        q, score_scale = (q / published_length).to(q.dtype), 1.0
    elif published_length is not None:
        score_scale = 1 / published_length
    else:
        real = row_scale if mask is None else mask.to(wide)
        row_scale = 1 / (real.cumsum(1) if causal else real.sum(1, keepdim=True).expand(batch, length)).clamp(min=1)
    if isinstance(bias, FactoredBias):  # products add up: s more features of queries and keys
        of_queries, of_keys = ((x.expand(batch, -1, -1)) for x in bias)
        q, k = torch.cat([q, (of_queries / score_scale).to(q.dtype)], -1), torch.cat([k, of_keys.to(k.dtype)], -1)
        bias = None
    with without_autocast(q):
        if backend == "tiled":
            out = tiled_quadratic.attend(q, k, v, bias=bias, row_scale=row_scale, score_scale=score_scale, causal=causal)
        else:
            from lineartime.ops.triton import quadratic as kernels

            out = kernels.attend(
                q,
                k,
                v,
                bias=bias,
                row_scale=row_scale.to(torch.float32),
                score_scale=score_scale,
                causal=causal,
                activation="laplace" if activation == "laplace" else "relu2",
            )
    return out.to(result_dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    d_qk: int,
    visible: Tensor | None,
    bias: Tensor | None,
    activation: Activation,
    published_length: float | Tensor | None,
) -> Tensor:
    dtype = matmul_dtype(q, k, v)
    with without_autocast(q):
        weights = attention_weights(
            q.to(dtype) @ k.to(dtype).mT,
            d_qk=d_qk,
            visible=visible,
            bias=bias,
            activation=activation,
            published_length=published_length,
        )
        out = weights.to(dtype) @ v.to(dtype)
    return out.to(output_dtype(v, dtype))


# 3. The streaming form ------------------------------------------------------------------------------------------------


class QuadraticState(NamedTuple):
    """Keys [B, T, s] and values [B, T, e] of all T tokens so far, or such for several heads: a cache that grows."""

    k: Tensor
    v: Tensor

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        return self.k.shape[-2]


def quadratic_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: QuadraticState,
    *,
    bias: Tensor | None = None,
    activation: Activation = "relu2",
    normalization: Literal["count"] | int = "count",
) -> tuple[Tensor, QuadraticState]:
    """Continue a causal sequence by N tokens; the outputs equal those of one causal `quadratic_attention` over everything.

    Args:
        q, k, v: [B, N, s], [B, N, s], [B, N, e] of the new tokens.
        state: what came before; it is not changed.
        bias: [N, T + N], the rows of the new tokens.

    Returns:
        The new tokens' outputs [B, N, e], and the state after them.
    """
    state = QuadraticState(torch.cat([state.k, k.to(state.k.dtype)], 1), torch.cat([state.v, v.to(state.v.dtype)], 1))
    new, total = q.shape[1], state.position
    out = _attend(
        q,
        state.k,
        state.v,
        d_qk=q.shape[-1],
        visible=torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new),
        bias=bias,
        activation=activation,
        published_length=None if normalization == "count" else float(normalization),
    )
    return out.to(output_dtype(v, out.dtype)), state


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | FactoredBias | None,
    mask: Tensor | None,
    activation: str,
    normalization: str | int,
) -> None:
    check_choice("activation", activation, ACTIVATIONS)
    if isinstance(normalization, str) or normalization < 1:
        check_choice("normalization", normalization, NORMALIZATIONS)
    check_queries_keys_values({"q": q, "k": k}, v)
    check_tokens(v.shape, mask, None)
    for part in bias if isinstance(bias, FactoredBias) else ():
        if part.dim() != 2 or len(part) != v.shape[1]:
            raise ValueError(f"bias has factors of shape {list(part.shape)}, but they must be [T, f] with T = {v.shape[1]}.")
    if not isinstance(bias, FactoredBias):
        check_bias(bias, v.shape[1], "T")


def check_queries_keys_values(queries_and_keys: dict[str, Tensor], v: Tensor) -> None:
    """Raise ValueError unless every named query or key is [B, T, s], with one s, for values [B, T, e]."""
    if v.dim() != 3:
        raise ValueError(f"v has shape {list(v.shape)}, but must be [B, T, e].")
    d_qk = next(iter(queries_and_keys.values())).shape[-1]
    for name, tensor in queries_and_keys.items():
        if tensor.shape != (*v.shape[:2], d_qk):
            expected = [*v.shape[:2], d_qk]
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but must be [B, T, s] = {expected}, v being {list(v.shape)}."
            )


def check_bias(bias: Tensor | None, size: int, letter: str) -> None:
    """Raise ValueError unless `bias` is None or [size, size]."""
    if bias is not None and bias.shape != (size, size):
        raise ValueError(f"bias has shape {list(bias.shape)}, but must be [{letter}, {letter}] = [{size}, {size}].")
