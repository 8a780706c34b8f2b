"""Attention in exported programs: one operator per layer, for any batch size and length.

The number of chunks or blocks depends on the length. torch.export would specialise the program to the numbers of its example.
An operator determines them when it runs, as the layer does, and also chooses the backend then. The backward pass recomputes the
forward pass.

Shapes: B batch, T tokens, R rows, L slots of a row, C chunk size, s query/key width, e value width.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.backends import Backend
from lineartime.ops.layout import Layout
from lineartime.ops.mixed_chunk import gated_mixed_chunk_attention
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.operator import refuse_second_derivative, register_operator
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic import attend_rows
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.tracing import under_transform


def mixed_chunk(
    projected: Projected, bias: Tensor | None, layout: Layout, options: MixedChunkOptions, backend: Backend
) -> Tensor:
    """`gated_mixed_chunk_attention` as one operator: [B, T, 2 e + s] -> [B, T, e]; the layout needs no chunks."""
    positions = None if layout.rotations is None else layout.positions
    rotary_width = None if layout.plan is None else layout.plan.rotary_features
    out: Tensor = _mixed_chunk_operator(
        *projected[:3], positions, bias, layout.mask, layout.document_starts, rotary_width or projected.d_qk,
        options.chunk_size, options.causal, options.activation, options.normalization, backend,
    )  # fmt: skip
    return out


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | FactoredBias | None,
    real: Tensor | None,
    options: QuadraticOptions,
    backend: Backend,
) -> Tensor:
    """`attend_rows` as one operator: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]."""
    factors = bias if isinstance(bias, FactoredBias) else (None, None)
    table = None if isinstance(bias, FactoredBias) else bias
    out: Tensor = _quadratic_operator(
        q, k, v, table, *factors, real, options.causal, options.activation, str(options.normalization), backend
    )
    return out


def _exported_mixed_chunk(
    projected: Tensor, gamma: Tensor, beta: Tensor, positions: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    cu_seqlens: Tensor | None, rotary_width: int, chunk_size: int, causal: bool, activation: str, normalization: str,
    backend: str,
) -> Tensor:  # fmt: skip
    _refuse_transforms()
    return gated_mixed_chunk_attention(
        projected,
        gamma,
        beta,
        chunk_size=chunk_size,
        positions=positions,
        rotary_width=rotary_width,
        causal=causal,
        bias=bias,
        mask=mask,
        cu_seqlens=cu_seqlens,
        activation=cast("Activation", activation),
        normalization=cast("Normalization", normalization),
        backend=cast("Backend", backend),
    )


def _exported_quadratic(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, of_queries: Tensor | None, of_keys: Tensor | None,
    real: Tensor | None, causal: bool, activation: str, normalization: str, backend: str,
) -> Tensor:  # fmt: skip
    _refuse_transforms()
    bias = table if of_queries is None or of_keys is None else FactoredBias(of_queries, of_keys)
    divisor = int(normalization) if normalization.isdecimal() else cast("Normalization", normalization)
    options = QuadraticOptions(causal, cast("Activation", activation), divisor)
    return attend_rows(q, k, v, bias, real, options, cast("Backend", backend))


def _refuse_transforms() -> None:
    """Raise RuntimeError where PyTorch would take the derivative of an operator for zero."""
    if under_transform():
        raise RuntimeError(
            "An exported program has no forward-mode derivatives and no transforms of torch.func: use the layer or model "
            "itself."
        )


def _fake_mixed_chunk(projected: Tensor, gamma: Tensor, *_: Any) -> Tensor:
    return projected.new_empty(*projected.shape[:2], (projected.shape[2] - gamma.shape[1]) // 2)


def _fake_quadratic(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    ctx.save_for_backward(*tensors)
    ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]


def _differentiated(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor | None, ...]]:
    def differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(d_out, "An exported program", "use the layer or model itself")
        wanted = [tensor is not None and needed for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)]
        with torch.enable_grad():
            inputs = [
                rest if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, rest, need in zip(ctx.saved_tensors, ctx.rest, wanted, strict=True)
            ]
            out = function(*inputs)
        differentiable = [x for x, need in zip(inputs, wanted, strict=True) if need]
        gradients = iter(torch.autograd.grad(out, differentiable, d_out, allow_unused=True))
        return tuple(next(gradients) if need else None for need in wanted)

    return differentiate


def _in_plain_pytorch(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: function(*inputs[:-1], "torch")  # the backend is the last argument


_mixed_chunk_operator = register_operator(
    _exported_mixed_chunk,
    _fake_mixed_chunk,
    keep_for_backward=_keep_for_backward,
    differentiate=_differentiated(_exported_mixed_chunk),
)
_quadratic_operator = register_operator(
    _exported_quadratic,
    _fake_quadratic,
    keep_for_backward=_keep_for_backward,
    differentiate=_differentiated(_exported_quadratic),
)

PLAIN: dict[Any, Callable[..., Tensor]] = {
    _mixed_chunk_operator: _in_plain_pytorch(_exported_mixed_chunk),
    _quadratic_operator: _in_plain_pytorch(_exported_quadratic),
}
"""The operators as operations of PyTorch, which other exporters can translate, for `ExportedProgram.run_decompositions`. They
compute the number of chunks from the length. The example of the program must be longer than a chunk."""
