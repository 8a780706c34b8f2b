"""All of a FLASH layer between its two linear projections on the GPU: projected tokens in, the gated output out.

Shapes: B batch, G chunks of all documents, C chunk size, R = B G C rows, e value width, s query/key width, W = 2 e + s.

    U, V, Z = split(silu(tokens))                                                  [R, e] [R, e] [R, s]
    q_quad, k_quad, q_lin, k_lin = rope(Z * gamma_i + beta_i)                       i = 1 ... 4
    gated = U * attention(q_quad, k_quad, q_lin, k_lin, V)                          as in mixed_chunk.py

Forward: one kernel computes V and the four maps; the kernel that reads the chunks multiplies its output by U.
Backward: one kernel computes the gradient of the gate, and one those of V and the maps. The forward pass keeps the tokens, the
attention's output and the states of the chunks; V and the maps are computed again.
Streams: an operator of their own takes the sum of the chunks so far and returns the new one. It has no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.precision import acc_dtype, without_autocast
from lineartime.ops.triton.chunk_kernels import Gate
from lineartime.ops.triton.common import state_dtype, workspace
from lineartime.ops.triton.gated_kernels import gate_gradient, open_gradient, open_tokens
from lineartime.ops.triton.mixed_chunk import Constants, Summary, backward, forward

# As an operator of PyTorch --------------------------------------------------------------------------------------------
# tokens: [B, G, C, W], zeros in slots that hold no token. gamma, beta: [4, s]. bias: [C, C], or None.
# rotations: [2, B or 1, G, C, s / 2], or None. real: bool [B, G, C], or None where all slots hold a token.
# row_scale, state_scale, document_starts, score_scale, causal, activation: as for `mixed_chunk.attend`.
# keep: whether a backward pass will follow.


def _triton_gated_mixed_chunk(
    tokens: Tensor, gamma: Tensor, beta: Tensor, bias: Tensor | None, rotations: Tensor | None, real: Tensor | None,
    row_scale: Tensor, state_scale: Tensor, document_starts: Tensor,
    score_scale: float, causal: bool, activation: str, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gated output [B, G, C, e] and, to be kept, the attention's output and the states of the chunks."""
    if tokens.numel() == 0:
        return _fake(tokens, gamma, beta, bias, rotations, real, row_scale, keep)
    tokens = tokens.contiguous()
    scale, offset = (x.to(acc_dtype(tokens)).contiguous() for x in (gamma, beta))
    v, maps = open_tokens(tokens, scale, offset, _contiguous(rotations), _contiguous(real))
    attended = workspace(v.shape, v.dtype, v.device) if keep else None
    constants = Constants(row_scale, state_scale, document_starts, score_scale, causal, activation)
    gate = Gate(tokens.flatten(0, 1), None if attended is None else attended.flatten(0, 1))
    out, states = forward((*maps.unbind(0), v), bias, constants, gate)
    out = out.to(tokens.dtype)
    return (out, tokens.new_empty(0), tokens.new_empty(0)) if attended is None else (out, attended, states)


def _triton_gated_mixed_chunk_backward(
    d_out: Tensor, attended: Tensor, states: Tensor,
    tokens: Tensor, gamma: Tensor, beta: Tensor, bias: Tensor | None, rotations: Tensor | None, real: Tensor | None,
    row_scale: Tensor, state_scale: Tensor, document_starts: Tensor,
    score_scale: float, causal: bool, activation: str, with_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if tokens.numel() == 0:
        d_tokens, d_gamma, d_beta, d_bias = _fake_backward(d_out, attended, states, tokens, gamma, beta, bias, with_d_bias)
        return d_tokens, d_gamma.zero_(), d_beta.zero_(), d_bias.zero_()
    tokens = tokens.contiguous()
    scale, offset = (x.to(acc_dtype(tokens)).contiguous() for x in (gamma, beta))
    rotations = _contiguous(rotations)
    d_tokens = workspace(tokens.shape, tokens.dtype, tokens.device)
    d_attended = gate_gradient(d_out.contiguous(), tokens, attended, d_tokens, gamma.shape[1])
    v, maps = open_tokens(tokens, scale, offset, rotations, _contiguous(real))
    constants = Constants(row_scale, state_scale, document_starts, score_scale, causal, activation)
    *d_maps, d_v, d_bias = backward((*maps.unbind(0), v), bias, constants, states, d_attended, with_d_bias)
    d_gamma, d_beta = open_gradient(tokens, scale, rotations, d_v, d_maps, d_tokens)
    return d_tokens, d_gamma.to(gamma.dtype), d_beta.to(beta.dtype), d_bias


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _fake(
    tokens: Tensor, gamma: Tensor, beta: Tensor, bias: Tensor | None, rotations: Tensor | None, real: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    (*shape, width), d_qk, keep = tokens.shape, gamma.shape[1], rest[-1]
    d_value = (width - d_qk) // 2
    out = tokens.new_empty(*shape, d_value)
    if not keep:
        return out, tokens.new_empty(0), tokens.new_empty(0)
    dtype = state_dtype(tokens.dtype)
    return out, torch.empty_like(out, dtype=dtype), tokens.new_empty(*shape[:2], d_qk, d_value, dtype=dtype)


def _fake_backward(
    d_out: Tensor,
    attended: Tensor,
    states: Tensor,
    tokens: Tensor,
    gamma: Tensor,
    beta: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with_d_bias = rest[-1]
    d_bias = bias.new_empty(bias.shape) if bias is not None and with_d_bias else tokens.new_empty(0)
    return tokens.new_empty(tokens.shape), gamma.new_empty(gamma.shape), beta.new_empty(beta.shape), d_bias


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, score_scale, causal, activation, _ = inputs
    _, attended, states = output
    ctx.save_for_backward(attended, states, *tensors)
    ctx.mark_non_differentiable(attended, states)
    ctx.set_materialize_grads(False)  # the gradients of these two are not used
    ctx.rest = (score_scale, causal, activation)


def _differentiate(ctx: Any, d_out: Tensor, *_not_differentiable: None) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(d_out, "backend 'triton'", "use backend='torch', or set_backend(model, 'torch')")
    with_d_bias = ctx.needs_input_grad[3]
    d_tokens, d_gamma, d_beta, d_bias = _backward_operator(d_out, *ctx.saved_tensors, *ctx.rest, with_d_bias)
    return d_tokens, d_gamma, d_beta, d_bias if with_d_bias else None, *(None,) * 9


_forward_operator = register_operator(
    _triton_gated_mixed_chunk, _fake, keep_for_backward=_keep_for_backward, differentiate=_differentiate
)
_backward_operator = register_operator(_triton_gated_mixed_chunk_backward, _fake_backward)


def attend(
    tokens: Tensor, gamma: Tensor, beta: Tensor, *, bias: Tensor | None = None, rotations: Tensor | None = None,
    real: Tensor | None = None, row_scale: Tensor, state_scale: Tensor, document_starts: Tensor, score_scale: float,
    causal: bool, activation: str,
) -> Tensor:  # fmt: skip
    """The gated output of projected tokens, [B, G, C, 2 e + s] -> [B, G, C, e]; see the comment above for the arguments."""
    inputs = (tokens, gamma, beta, bias)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    with without_autocast(tokens):
        out: Tensor = _forward_operator(
            *inputs, rotations, real, row_scale, state_scale, document_starts, score_scale, causal, activation, keep
        )[0]
    return out


# Streams --------------------------------------------------------------------------------------------------------------


def _triton_gated_mixed_chunk_extend(
    tokens: Tensor, gamma: Tensor, beta: Tensor, summary: Tensor, bias: Tensor | None, rotations: Tensor | None,
    row_scale: Tensor, state_scale: Tensor, document_starts: Tensor, score_scale: float, activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens = tokens.contiguous()
    scale, offset = (x.to(acc_dtype(tokens)).contiguous() for x in (gamma, beta))
    v, maps = open_tokens(tokens, scale, offset, _contiguous(rotations), None)
    constants = Constants(row_scale, state_scale, document_starts, score_scale, True, activation)
    carried = Summary(summary.contiguous(), workspace(summary.shape, summary.dtype, summary.device))
    out, _ = forward((*maps.unbind(0), v), bias, constants, Gate(tokens.flatten(0, 1), None), carried)
    return out.to(tokens.dtype), carried.after


def _fake_extend(tokens: Tensor, gamma: Tensor, beta: Tensor, summary: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    d_value = (tokens.shape[-1] - gamma.shape[1]) // 2
    return tokens.new_empty(*tokens.shape[:3], d_value), torch.empty_like(summary)


_extend_operator = register_operator(_triton_gated_mixed_chunk_extend, _fake_extend)


def extend(
    tokens: Tensor, gamma: Tensor, beta: Tensor, summary: Tensor, *, bias: Tensor | None, rotations: Tensor | None,
    row_scale: Tensor, state_scale: Tensor, document_starts: Tensor, score_scale: float, activation: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Causal `attend` for streams, each a row, after a sum of k_lin^T v, [B, s, e]; it has no gradient.

    Returns:
        The gated output, and the sum with these tokens.
    """
    out: tuple[Tensor, Tensor] = _extend_operator(
        tokens, gamma, beta, summary, bias, rotations, row_scale, state_scale, document_starts, score_scale, activation
    )
    return out
