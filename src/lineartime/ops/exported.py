"""Attention in exported programs: one operator per layer, for any batch size and length.

The number of chunks or blocks depends on the length. torch.export would specialise the program to the numbers of its example.
An operator determines them when it runs, as the layer does, and also chooses the backend then. The backward pass recomputes the
forward pass.

Shapes: B batch, T tokens, R rows, L slots of a row, C chunk size, s query/key width, e value width.
"""

from collections.abc import Callable
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor

from lineartime.ops.activations import Activation, Normalization
from lineartime.ops.backends import Backend
from lineartime.ops.batch import Batch
from lineartime.ops.mixed_chunk import gated_mixed_chunk_attention
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions, Projected
from lineartime.ops.operator import register_operator
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic import attend_rows
from lineartime.ops.quadratic.inputs import QuadraticOptions
from lineartime.ops.tracing import under_transform

PLAIN: dict[Any, Callable[..., Tensor]] = {}
"""The operators as operations of PyTorch, which other exporters can translate, for `ExportedProgram.run_decompositions`. They
compute the number of chunks from the length. The example of the program must be longer than a chunk."""


def _exported(name: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """An attention as an operator with the arguments of the function, of which the last is the backend."""
    types = {key: hint for key, hint in get_type_hints(function).items() if key != "return"}

    def computed(*arguments: Any) -> Tensor:
        if under_transform():  # PyTorch would take the derivative of an operator for zero
            raise RuntimeError(
                "An exported program has no forward-mode derivatives and no transforms of torch.func: use the layer or model "
                "itself."
            )
        return function(**dict(zip(types, arguments, strict=True)))

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]

    def differentiate(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = [None if x is None else x.detach() for x in ctx.saved_tensors]
        wanted = [x.requires_grad_() for x, need in zip(saved, ctx.needs_input_grad, strict=True) if x is not None and need]
        with torch.enable_grad():
            out = computed(*(rest if x is None else x for x, rest in zip(saved, ctx.rest, strict=True)))
        gradients = iter(torch.autograd.grad(out, wanted, d_out, allow_unused=True))
        return tuple(next(gradients) if x is not None and x.requires_grad else None for x in saved)

    operator = register_operator(
        computed, fake, name=name, types=types, keep_for_backward=keep, differentiate=differentiate,
        once=("An exported program", "use the layer or model itself"),
    )  # fmt: skip
    PLAIN[operator] = lambda *inputs: computed(*inputs[:-1], "torch")
    return operator


def mixed_chunk(
    projected: Projected, bias: Tensor | None, batch: Batch, options: MixedChunkOptions, backend: Backend
) -> Tensor:
    """`gated_mixed_chunk_attention` as one operator: [B, T, 2 e + s] -> [B, T, e]; the batch needs no chunks."""
    starts = batch.starts
    if starts is not None and batch.is_real is not None:  # padding comes after the last document
        starts = torch.cat([starts[:-1], starts.new_full((1,), projected.tokens.shape[1])])
    out: Tensor = _mixed_chunk_operator(
        *projected[:3], options.chunk_size, batch.rotations, options.causal, bias, batch.is_real, starts, None,
        options.activation, options.normalization, backend,
    )  # fmt: skip
    return out


_mixed_chunk_operator = _exported(
    "exported_mixed_chunk",
    gated_mixed_chunk_attention,
    lambda projected, gamma, *_: projected.new_empty(*projected.shape[:2], (projected.shape[2] - gamma.shape[1]) // 2),
)


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


def _quadratic(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, of_queries: Tensor | None, of_keys: Tensor | None,
    real: Tensor | None, causal: bool, activation: str, normalization: str, backend: str,
) -> Tensor:  # fmt: skip
    bias = table if of_queries is None or of_keys is None else FactoredBias(of_queries, of_keys)
    divisor = int(normalization) if normalization.isdecimal() else cast("Normalization", normalization)
    options = QuadraticOptions(causal, cast("Activation", activation), divisor)
    return attend_rows(q, k, v, bias, real, options, cast("Backend", backend))


_quadratic_operator = _exported(
    "exported_quadratic",
    _quadratic,
    lambda q, k, v, *_: v.new_empty(v.shape),
)
