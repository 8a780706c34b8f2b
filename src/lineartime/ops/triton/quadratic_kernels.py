"""The kernels of quadratic attention, without a T x T matrix in memory, forward or backward.

Shapes: B batch, T tokens, s query/key width, e value width.

    out[t] = sum over j of P[t, j] v[j]          P[t, j] = r[t] f(X[t, j])     X[t, j] = c q[t].k[j] + bias[t, j]
    dv[j]  = sum over t of P[t, j] dout[t]      dX[t, j] = r[t] f'(X[t, j]) dout[t].v[j]
    dq[t]  = c sum over j of dX[t, j] k[j]         dk[j] = c sum over t of dX[t, j] q[t]        dbias = sum over b of dX

with r = row_scale, c = score_scale, f the activation, and P = dX = 0 at j > t where attention is causal.

A program owns a block of rows and walks over the blocks of the others, whose scores it computes on the way. The rows are
queries and the others keys; for dv and dk it is the other way round: TRANSPOSED. Every number is
summed by one program in a fixed order, so that the same inputs always give the same bits.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton.common import (
    activate,
    add_product,
    as_operand,
    configurations,
    jit,
    length_bucket,
    load_tile,
    number_formats,
    on_device,
    store_tile,
    token_bucket,
    tuned,
    width_block,
    workspace,
)
from lineartime.ops.triton.fit import score_gradient_is_unfit, score_input_gradient_is_unfit, weigh_is_unfit
from lineartime.ops.triton.score_tiles import mask_tile, score_gradient_tile, score_tile, tile_of_program, visible_range

# 1. out, and dv -------------------------------------------------------------------------------------------------------


@tuned(
    configurations(
        ("BLOCK_M", "BLOCK_N", "BLOCK_E"),
        (128, 64, 256, 8, 2),
        (128, 64, 128, 8, 2),
        (64, 64, 256, 8, 2),
        (64, 64, 128, 4, 2),
        (64, 32, 64, 4, 2),
        (32, 32, 32, 4, 2),
    ),
    key=["bucket", "tokens", "S", "E", "CAUSAL", "ACTIVATION", "HAS_BIAS", "TRANSPOSED", "PRECISION"],
    interpreted={"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_E": 32},
    unfit=weigh_is_unfit,
)
@jit
def weigh_kernel(
    x, y, values, bias, row_scale, out, T, bucket, tokens, score_scale,
    S: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """P values or P^T values. One program computes a tile of the output of one sequence."""
    # Programs side by side have the same rows, whose queries and keys they find in the cache.
    column_blocks = (E + BLOCK_E - 1) // BLOCK_E
    blocks = (T + BLOCK_M - 1) // BLOCK_M
    batch = (tl.program_id(0) // (blocks * column_blocks)).to(tl.int64)
    block = tl.program_id(0) // column_blocks % blocks
    if CAUSAL and not TRANSPOSED:
        block = blocks - 1 - block  # the longest rows first, so that none is left for the end
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % column_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    inner = tl.arange(0, BLOCK_S)
    x += batch * T * S
    y += batch * T * S
    values += batch * T * E
    row_scale += batch * T
    acc = tl.full((BLOCK_M, BLOCK_E), 0.0, ACC)

    first, last = visible_range(block, T, CAUSAL, TRANSPOSED, BLOCK_M, BLOCK_N)
    x_tile = load_tile(x, rows, inner, T, S, COMPUTE)
    for start in range(first, last, BLOCK_N):
        others = start + tl.arange(0, BLOCK_N)
        scores = score_tile(x, y, bias, x_tile, rows, others, T, score_scale, S, HAS_BIAS, COMPUTE, PRECISION, BLOCK_S)
        weights = mask_tile(activate(scores, ACTIVATION), rows, others, row_scale, T, CAUSAL, TRANSPOSED)
        value = load_tile(values, others, columns, T, E, COMPUTE)
        acc = add_product(acc, as_operand(weights, COMPUTE, PRECISION), value, PRECISION)
    store_tile(out + batch * T * E, acc, rows, columns, T, E)


def weigh(
    q: Tensor, k: Tensor, values: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, *, causal: bool,
    activation: str, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """P values: [B, T, s] x 2, [B, T, e] -> [B, T, e]; transposed, P^T values, of a bias that is transposed too."""
    (batch, length, width), n_columns = q.shape, values.shape[-1]
    out = workspace(values.shape, values.dtype, values.device)

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (batch * triton.cdiv(length, config["BLOCK_M"]) * triton.cdiv(n_columns, config["BLOCK_E"]),)

    x, y = (k, q) if transposed else (q, k)
    with on_device(values):
        weigh_kernel[grid](
            x, y, values, bias, row_scale, out, length, length_bucket(length), token_bucket(batch * length), score_scale,
            S=width, E=n_columns, CAUSAL=causal, ACTIVATION=activation, HAS_BIAS=bias is not None, TRANSPOSED=transposed,
            BLOCK_S=width_block(width, values.dtype), **number_formats(values.dtype),
        )  # fmt: skip
    return out


# 2. dq, and dk --------------------------------------------------------------------------------------------------------


@tuned(
    configurations(
        ("BLOCK_M", "BLOCK_N", "BLOCK_E"),
        (128, 64, 64, 8, 3),
        (128, 32, 64, 8, 3),
        (64, 32, 64, 4, 3),
        (64, 32, 32, 4, 2),
        (32, 32, 32, 4, 2),
    ),
    key=["bucket", "tokens", "S", "E", "CAUSAL", "ACTIVATION", "HAS_BIAS", "TRANSPOSED", "PRECISION"],
    interpreted={"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_E": 32},
    unfit=score_input_gradient_is_unfit,
)
@jit
def score_input_gradient_kernel(
    x, y, x_values, y_values, bias, row_scale, out, T, bucket, tokens, score_scale,
    S: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    TRANSPOSED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`dq` = c dX k, or dk = c dX^T q. One program computes a block of rows of one sequence."""
    blocks = (T + BLOCK_M - 1) // BLOCK_M
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if CAUSAL and not TRANSPOSED:
        block = blocks - 1 - block
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    x += batch * T * S
    y += batch * T * S
    x_values += batch * T * E
    y_values += batch * T * E
    row_scale += batch * T

    first, last = visible_range(block, T, CAUSAL, TRANSPOSED, BLOCK_M, BLOCK_N)
    acc = tl.full((BLOCK_M, BLOCK_S), 0.0, ACC)
    x_tile = load_tile(x, rows, tl.arange(0, BLOCK_S), T, S, COMPUTE)
    for start in range(first, last, BLOCK_N):
        others = start + tl.arange(0, BLOCK_N)
        scores = score_tile(x, y, bias, x_tile, rows, others, T, score_scale, S, HAS_BIAS, COMPUTE, PRECISION, BLOCK_S)
        d_scores = score_gradient_tile(
            scores, x_values, y_values, row_scale, rows, others, T,
            E, CAUSAL, ACTIVATION, TRANSPOSED, COMPUTE, PRECISION, ACC, BLOCK_M, BLOCK_N, BLOCK_E,
        )  # fmt: skip
        y_tile = load_tile(y, others, columns, T, S, COMPUTE)
        acc = add_product(acc, as_operand(d_scores, COMPUTE, PRECISION), y_tile, PRECISION)
    store_tile(out + batch * T * S, acc * score_scale, rows, columns, T, S)


def score_input_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, d_out: Tensor, score_scale: float, *,
    causal: bool, activation: str, transposed: bool,
) -> Tensor:  # fmt: skip
    """`dq` or, transposed, of a bias that is transposed too, dk: [B, T, s]."""
    (batch, length, width), n_columns = q.shape, v.shape[-1]
    x, y, x_values, y_values = (k, q, v, d_out) if transposed else (q, k, d_out, v)
    out, block = workspace(x.shape, x.dtype, x.device), width_block(width, v.dtype)

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return batch * triton.cdiv(length, config["BLOCK_M"]), triton.cdiv(width, block)

    with on_device(v):
        score_input_gradient_kernel[grid](
            x, y, x_values, y_values, bias, row_scale, out, length, length_bucket(length),
            token_bucket(batch * length), score_scale,
            S=width, E=n_columns, CAUSAL=causal, ACTIVATION=activation, HAS_BIAS=bias is not None,
            TRANSPOSED=transposed, BLOCK_S=block, **number_formats(v.dtype),
        )  # fmt: skip
    return out


# 3. dX, and dbias -----------------------------------------------------------------------------------------------------


@tuned(
    configurations(
        ("BLOCK_M", "BLOCK_N", "BLOCK_E"),
        (128, 128, 64, 8, 3),
        (128, 64, 64, 8, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 32, 4, 2),
        (64, 32, 32, 4, 2),
        (32, 32, 32, 4, 2),
    ),
    key=["SUMS", "bucket", "tokens", "S", "E", "CAUSAL", "ACTIVATION", "HAS_BIAS", "HAS_WEIGHTS", "PRECISION"],
    interpreted={"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_E": 32},  # smaller than those that read what this one writes
    unfit=score_gradient_is_unfit,
)
@jit
def score_gradient_kernel(
    q, k, v, bias, row_scale, d_out, weights, out, n_summed, T, bucket, tokens, score_scale,
    S: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, SUMS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of dX over the g-th n_summed of the sequences, and P of each. One program computes one tile of one g.

    SUMS, whether n_summed > 1, is for the autotuner, so that it does not time another number of sequences again.
    """
    group, row_start, other_start = tile_of_program(T, BLOCK_M, BLOCK_N)
    rows = row_start + tl.arange(0, BLOCK_M)
    others = other_start + tl.arange(0, BLOCK_N)

    members = n_summed
    if CAUSAL:
        members = tl.where(other_start < row_start + BLOCK_M, n_summed, 0)  # no query of the tile sees any of its keys
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC)
    if HAS_WEIGHTS:
        for member in range(members, n_summed):
            store_tile(weights + (group * n_summed + member) * T * T, acc, rows, others, T, T)
    for member in range(0, members):
        batch = group * n_summed + member
        x_tile = load_tile(q + batch * T * S, rows, tl.arange(0, BLOCK_S), T, S, COMPUTE)
        scores = score_tile(
            q + batch * T * S, k + batch * T * S, bias, x_tile, rows, others, T, score_scale,
            S, HAS_BIAS, COMPUTE, PRECISION, BLOCK_S,
        )  # fmt: skip
        if HAS_WEIGHTS:
            tile = mask_tile(activate(scores, ACTIVATION), rows, others, row_scale + batch * T, T, CAUSAL, False)
            store_tile(weights + batch * T * T, tile, rows, others, T, T)
        acc += score_gradient_tile(
            scores, d_out + batch * T * E, v + batch * T * E, row_scale + batch * T, rows, others, T,
            E, CAUSAL, ACTIVATION, False, COMPUTE, PRECISION, ACC, BLOCK_M, BLOCK_N, BLOCK_E,
        )  # fmt: skip
    store_tile(out + group * T * T, acc, rows, others, T, T)


def score_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, d_out: Tensor, score_scale: float, *,
    causal: bool, activation: str, n_summed: int, dtype: torch.dtype, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dX, summed over every n_summed sequences that follow each other: [B / n_summed, T, T] in `dtype`.

    P is written to `weights` [B, T, T] where given: its scores are the same.
    """
    (batch, length, width), n_columns = q.shape, v.shape[-1]
    out = workspace((batch // n_summed, length, length), dtype, v.device)

    def grid(config: dict[str, Any]) -> tuple[int]:
        blocks = triton.cdiv(length, config["BLOCK_M"]) * triton.cdiv(length, config["BLOCK_N"])
        return (batch // n_summed * blocks,)

    with on_device(v):
        score_gradient_kernel[grid](
            q, k, v, bias, row_scale, d_out, weights, out, n_summed, length, length_bucket(length),
            token_bucket(batch * length), score_scale,
            S=width, E=n_columns, CAUSAL=causal, ACTIVATION=activation, HAS_BIAS=bias is not None,
            HAS_WEIGHTS=weights is not None, SUMS=n_summed > 1, BLOCK_S=width_block(width, v.dtype),
            **number_formats(v.dtype),
        )  # fmt: skip
    return out
