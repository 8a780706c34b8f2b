"""Mixed chunk attention by Triton kernels: the chunks are the batch of a quadratic attention, and read a state of all they see.

Shapes: B batch, D documents, G chunks of all documents, C chunk size, s query/key width, e value width.

    out[g, t] = sum over j of P[g, t, j] v[g, j] + q_lin[g, t] . M[g]               P, and dX below, as in score_kernels.py
    M[g] = a[g] sum over h in R(g) of k_lin[h]^T v[h]                N[h] = sum over g with h in R(g) of a[g] q_lin[g]^T dout[g]

    dv[h, j] = sum over t of P[h, t, j] dout[h, t] + k_lin[h, j] . N[h]
    dq_lin[g, t] = M[g] dout[g, t]        dq_quad[g] = c dX[g] k_quad[g]        dbias = sum over the chunks of dX
    dk_lin[h, j] = N[h] v[h, j]           dk_quad[g] = c dX[g]^T q_quad[g]

with a = state_scale, c = score_scale, and R(g) the chunks of g's document: all of them or, where attention is causal, those
before g. M and N [B, G, s, e], P and, backward, dX [B, G, C, C] are in memory, which keeps it linear in the number of tokens;
M is kept for the backward pass, which computes P and dX from the same scores.

Kernels compute P and dX, and the sums over chunks; PyTorch multiplies matrices, also the half of P that causality masks.

Of a FLASH layer, one kernel makes V and the four maps of the projected tokens, and one multiplies the output by the gate U.
Backward, one computes the gradient of the gate, and one those of V and the maps. The forward pass keeps the tokens, the
attention's output and M; V and the maps are computed again.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from lineartime.ops.backends import Backend, why_not
from lineartime.ops.batch import Batch
from lineartime.ops.flops import chunk_products
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions, Projected, chunk_scales
from lineartime.ops.operator import Fused, register_operator
from lineartime.ops.precision import acc_dtype, common_dtype, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.triton import state_dtype, workspace

if TYPE_CHECKING:
    from lineartime.ops.triton.chunk_kernels import Summary


class OfHeads(NamedTuple):
    """The inputs of attention in chunks.

    Attributes:
        q_quad, k_quad, q_lin, k_lin: [B, G, C, s].
        v: [B, G, C, e]; it and k_lin are zero in slots that must not be read.
        bias: [C, C], or None.
        row_scale: float32 [B or 1, G, C], of the quadratic part.
        state_scale: float32 [B or 1, G], of the linear part.
        document_starts: int32 [D + 1], rising from 0 to G: the first chunk of every document, and the end.
        score_scale: the scores are score_scale * q.k + bias.
        causal: whether a token reads only itself and earlier tokens of its chunk, and the chunks before.
        activation: "relu2" or "laplace".
    """

    q_quad: Tensor
    k_quad: Tensor
    q_lin: Tensor
    k_lin: Tensor
    v: Tensor
    bias: Tensor | None
    row_scale: Tensor
    state_scale: Tensor
    document_starts: Tensor
    score_scale: float
    causal: bool
    activation: str

    @property
    def widths(self) -> tuple[int, int]:
        """The widths s and e."""
        return self.q_quad.shape[-1], self.v.shape[-1]


class OfTokens(NamedTuple):
    """The inputs of a layer between its projections; what is missing here is as in `OfHeads`.

    Attributes:
        tokens: [B, G, C, 2 e + s], zeros in slots that hold no token.
        gamma, beta: [4, s].
        rotations: [2, B or 1, G, C, s / 2], or None.
        real: bool [B, G, C], or None where all slots hold a token.
    """

    tokens: Tensor
    gamma: Tensor
    beta: Tensor
    bias: Tensor | None
    rotations: Tensor | None
    real: Tensor | None
    row_scale: Tensor
    state_scale: Tensor
    document_starts: Tensor
    score_scale: float
    causal: bool
    activation: str

    @property
    def widths(self) -> tuple[int, int]:
        """The widths s and e."""
        d_qk = self.gamma.shape[1]
        return d_qk, (self.tokens.shape[-1] - d_qk) // 2


# 1. The forms ---------------------------------------------------------------------------------------------------------


def attend(heads: Heads, bias: Tensor | None, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """The same function as the chunked form, [B, T, e]; it keeps the states of chunks, and no scores."""
    dtype = common_dtype(*heads)
    with without_autocast(heads.v):
        cut = (batch.cut(x.to(dtype)) for x in heads)
        out = of_heads(OfHeads._make((*cut, bias, *_constants(batch, options, heads.q_quad.shape[-1], heads.v))))
        return batch.join(out.to(output_dtype(heads.v, matmul_dtype(*heads))))


def attend_gated(projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """All of a FLASH layer between its linear projections, [B, T, e]: the kernels also make queries, keys and values."""
    return _join(of_tokens(_inputs(projected, bias, batch, options)), projected, batch)


def can_extend(
    projected: Projected, bias: Tensor | None, options: MixedChunkOptions, summary: Tensor, backend: Backend
) -> bool:
    """Whether `extend_gated` takes streams: the backend chooses the kernels, they can run here, and no gradient is needed."""
    tokens, gamma, beta = projected[:3]
    if backend != "triton" and not (backend == "auto" and tokens.is_cuda):
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (tokens, gamma, beta, bias, summary)):
        return False
    return why_not("triton", tokens.device, matmul_dtype(tokens, gamma), options.activation) is None


def extend_gated(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, summary: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Causal `attend_gated` for whole chunks of new tokens of streams, after others: [B, N, 2 e + s] -> [B, N, e], no gradient.

    `summary`, [B, s, e], is the sum of k_lin v^T over the `position` tokens before, which are whole chunks. It is not changed;
    the summary with the new tokens is returned, too.
    """
    inputs = _inputs(projected, bias, batch, options, position)
    with without_autocast(projected.tokens):
        out, summary = extend_operator(*inputs, summary)
    return _join(out, projected, batch), summary


def _inputs(projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, before: int = 0) -> OfTokens:
    """The inputs in the dtype to compute in, which depends on the autocast of the caller."""
    tokens, gamma, beta = projected.with_bias()[:3]
    constants = _constants(batch, options, projected.d_qk, tokens, before)
    cut = batch.cut(tokens.to(common_dtype(tokens, gamma)))
    return OfTokens(cut, gamma, beta, bias, batch.chunk_rotations, batch.real, *constants)


def _join(out: Tensor, projected: Projected, batch: Batch) -> Tensor:
    compute = matmul_dtype(projected.tokens, projected.gamma)
    return batch.join(out.to(output_dtype(projected.tokens, compute)))


def _constants(batch: Batch, options: MixedChunkOptions, d_qk: int, like: Tensor, before: int = 0) -> tuple[Any, ...]:
    """The last six inputs, which have no gradient, for documents after `before` other tokens."""
    scales = chunk_scales(batch, options, d_qk, like, before)
    row_scale = scales.row_scale.expand(-1, scales.state_scale.shape[1], batch.chunk_size).contiguous()
    starts = batch.chunk_starts.int()
    if batch.chunk_document is not None:
        # Compiled code cuts a pack into as many chunks as there can be. Those that no document fills get states, too.
        starts = torch.cat([starts[:-1], starts.new_full((1,), batch.n_chunks)])
    return row_scale, scales.state_scale, starts, scales.score_scale, options.causal, options.activation


# 2. Of queries, keys and values ---------------------------------------------------------------------------------------


def _forward(inputs: OfHeads, summary: "Summary | None" = None) -> tuple[Tensor, Tensor]:
    """The output, and M, which the backward pass reads; a summary as for `chunk_states`."""
    from lineartime.ops.triton.chunk_kernels import chunk_states  # Triton may be absent
    from lineartime.ops.triton.score_kernels import attention_weights

    if inputs.v.numel() == 0:
        out, states = _fake(inputs)
        return out, states
    q_quad, k_quad, q_lin, k_lin, v, bias, row_scale, state_scale, starts, score_scale, causal, activation = _whole(inputs)
    states = chunk_states(k_lin, v, state_scale, starts, causal=causal, transposed=False, summary=summary)
    q, k, values, readers, of_chunks = (x.flatten(0, 1) for x in (q_quad, k_quad, v, q_lin, states))
    weights = attention_weights(q, k, bias, row_scale, score_scale, dtype=states.dtype, causal=causal, activation=activation)
    return _read(weights, values, readers, of_chunks).view(v.shape), states


def _read(weights: Tensor, values: Tensor, readers: Tensor, states: Tensor) -> Tensor:
    """`weights` values + readers states: [N, C, C], [N, C, e], [N, C, s], [N, s, e] -> [N, C, e] in the dtype of the values."""
    dtype = states.dtype
    return (weights @ values.to(dtype)).baddbmm_(readers.to(dtype), states).to(values.dtype)


def _whole(inputs: OfHeads) -> OfHeads:
    """The same, contiguous, with a factor for every row and every chunk."""
    *heads, bias, row_scale, state_scale, starts, score_scale, causal, activation = inputs
    shape = inputs.v.shape
    scales = row_scale.expand(shape[:3]).contiguous(), state_scale.expand(shape[:2]).contiguous()
    bias = None if bias is None else bias.contiguous()
    return OfHeads._make((*(x.contiguous() for x in heads), bias, *scales, starts, score_scale, causal, activation))


def _fake(inputs: OfHeads, keep: bool = True) -> tuple[Tensor, Tensor]:
    k_lin, v = inputs.k_lin, inputs.v
    shape = (*v.shape[:2], k_lin.shape[-1], v.shape[-1])
    return v.new_empty(v.shape), workspace(shape, state_dtype(v.dtype), v.device)


def _backward(inputs: OfHeads, states: Tensor, d_out: Tensor, with_d_bias: bool) -> list[Any]:
    """The gradients of q_quad, k_quad, q_lin, k_lin, v and, if asked for, of the bias."""
    from lineartime.ops.triton.chunk_kernels import chunk_states  # Triton may be absent
    from lineartime.ops.triton.score_kernels import score_gradient

    if inputs.v.numel() == 0:
        return [None if x is None else x.new_zeros(x.shape) for x in inputs[:6]]
    q_quad, k_quad, q_lin, k_lin, v, bias, row_scale, state_scale, starts, score_scale, causal, activation = _whole(inputs)
    d_out, dtype = d_out.contiguous(), state_dtype(v.dtype)
    d_q_lin = d_out.to(dtype) @ states.mT
    states = chunk_states(q_lin, d_out, state_scale, starts, causal=causal, transposed=True)
    d_k_lin = v.to(dtype) @ states.mT

    q, k, values, d_values = (x.flatten(0, 1) for x in (q_quad, k_quad, v, d_out))
    weights, d_scores = score_gradient(
        q, k, values, bias, row_scale, d_values, score_scale, dtype=dtype, causal=causal, activation=activation
    )
    d_v = _read(weights.mT, d_values, k_lin.flatten(0, 1), states.flatten(0, 1))
    del weights, states
    nothing = d_scores.new_zeros(1, 1, 1)  # baddbmm multiplies by score_scale before it rounds
    d_q_quad = torch.baddbmm(nothing, d_scores, k.to(dtype), beta=0, alpha=score_scale).view(q_quad.shape)
    d_k_quad = torch.baddbmm(nothing, d_scores.mT, q.to(dtype), beta=0, alpha=score_scale).view(k_quad.shape)
    d_bias = d_scores.sum(0, dtype=acc_dtype(d_scores)) if with_d_bias else None
    return [*(x.to(v.dtype) for x in (d_q_quad, d_k_quad, d_q_lin, d_k_lin)), d_v.view(v.shape), d_bias]


def _flops(inputs: OfHeads | OfTokens, backward: bool = False) -> int:
    (batch, n_chunks, chunk_size, _), (d_qk, d_value) = inputs[0].shape, inputs.widths
    of_pairs, n_sums = (3 * d_qk + 2 * d_value, 4) if backward else (d_qk + d_value, 2)
    return chunk_products(batch, n_chunks, chunk_size, of_pairs, n_sums * n_chunks, d_qk * d_value)


of_heads = Fused(
    "triton_mixed_chunk", OfHeads, lambda inputs, keep: _forward(inputs), _fake,
    lambda inputs, kept, d_out, wanted: _backward(inputs, kept[0], d_out, wanted[5]), n_kept=1,
    wrt=("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias"), what="backend 'triton'",
    flops=_flops, backward_flops=lambda inputs, wanted: _flops(inputs, backward=True),
)  # fmt: skip


# 3. Of projected tokens -----------------------------------------------------------------------------------------------


def _opened(inputs: OfTokens) -> tuple[OfTokens, OfHeads]:
    """The inputs, contiguous, with gamma and beta in float32 or better, and the queries, keys and values they make."""
    from lineartime.ops.triton.gated_kernels import open_tokens  # Triton may be absent

    tokens = inputs.tokens.contiguous()
    gamma, beta = (x.to(acc_dtype(tokens)).contiguous() for x in (inputs.gamma, inputs.beta))
    rotations, real = (None if x is None else x.contiguous() for x in (inputs.rotations, inputs.real))
    v, maps = open_tokens(tokens, gamma, beta, rotations, real)
    heads = OfHeads._make((*maps.unbind(0), v, inputs.bias, *inputs[6:]))
    return OfTokens(tokens, gamma, beta, inputs.bias, rotations, real, *inputs[6:]), heads


def _forward_of_tokens(inputs: OfTokens, keep: bool) -> tuple[Tensor, ...]:
    """The gated output [B, G, C, e] and, to be kept, the attention's output and the states of the chunks."""
    from lineartime.ops.triton.gated_kernels import gate  # Triton may be absent

    if inputs.tokens.numel() == 0:
        return _fake_of_tokens(inputs, keep)
    inputs, heads = _opened(inputs)
    attended, states = _forward(heads)
    out = gate(attended, inputs.tokens, inputs.gamma.shape[1])
    return (out, attended, states) if keep else (out,)


def _fake_of_tokens(inputs: OfTokens, keep: bool) -> tuple[Tensor, ...]:
    tokens, (d_qk, d_value) = inputs.tokens, inputs.widths
    dtype, shape = state_dtype(tokens.dtype), tokens.shape[:3]
    attended, states = (tokens.new_empty(*x, d_value, dtype=dtype) for x in (shape, (*shape[:2], d_qk)))
    return tokens.new_empty(*shape, d_value), attended, states


def _backward_of_tokens(inputs: OfTokens, kept: tuple[Tensor, ...], d_out: Tensor, wanted: list[bool]) -> list[Tensor | None]:
    from lineartime.ops.triton.gated_kernels import gate_gradient, open_gradient  # Triton may be absent

    if inputs.tokens.numel() == 0:
        return [None if x is None else x.new_zeros(x.shape) for x in inputs[:4]]
    (attended, states), (inputs, heads) = kept, _opened(inputs)
    tokens = inputs.tokens
    d_tokens = workspace(tokens.shape, tokens.dtype, tokens.device)
    d_attended = gate_gradient(d_out.contiguous(), tokens, attended, d_tokens, inputs.gamma.shape[1])
    *d_maps, d_v, d_bias = _backward(heads, states, d_attended, wanted[3])
    return [d_tokens, *open_gradient(tokens, inputs.gamma, inputs.rotations, d_v, d_maps, d_tokens), d_bias]


of_tokens = Fused(
    "triton_gated_mixed_chunk", OfTokens, _forward_of_tokens, _fake_of_tokens, _backward_of_tokens, n_kept=2,
    wrt=("tokens", "gamma", "beta", "bias"), what="backend 'triton'",
    flops=_flops, backward_flops=lambda inputs, wanted: _flops(inputs, backward=True),
)  # fmt: skip


def _extend(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The gated output of streams, each a row, after a sum of k_lin^T v, [B, s, e], and the sum with these tokens."""
    from lineartime.ops.triton.chunk_kernels import Summary  # Triton may be absent
    from lineartime.ops.triton.gated_kernels import gate

    *given, summary = arguments
    inputs, heads = _opened(OfTokens(*given))
    carried = Summary(summary.contiguous(), workspace(summary.shape, summary.dtype, summary.device))
    attended, _ = _forward(heads, carried)
    return gate(attended, inputs.tokens, inputs.gamma.shape[1]), carried.after


extend_operator = register_operator(
    _extend, lambda *arguments: (_fake_of_tokens(OfTokens(*arguments[:-1]), False)[0], torch.empty_like(arguments[-1])),
    name="triton_gated_mixed_chunk_extend", types={**get_type_hints(OfTokens), "summary": Tensor}, n_results=2,
    flops=lambda summary, **inputs: _flops(OfTokens(**inputs)),
)  # fmt: skip
