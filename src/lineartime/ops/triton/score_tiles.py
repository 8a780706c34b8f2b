"""Tiles of the scores of quadratic attention, and of their gradients: X, P and dX in quadratic_kernels.py."""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

import triton.language as tl

from lineartime.ops.triton.common import activation_slope, add_product, jit, load_tile


@jit
def tile_of_program(T, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The matrix [T, T] of this program, if each has one tile of one matrix, and the first row and column of the tile."""
    row_blocks = (T + BLOCK_M - 1) // BLOCK_M
    other_blocks = (T + BLOCK_N - 1) // BLOCK_N
    matrix = (tl.program_id(0) // (row_blocks * other_blocks)).to(tl.int64)
    block = tl.program_id(0) % (row_blocks * other_blocks)
    return matrix, block // other_blocks * BLOCK_M, block % other_blocks * BLOCK_N


@jit
def visible_range(block, T, CAUSAL: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first of the others that a block of rows reads, in steps of BLOCK_N, and the end of them."""
    first = 0
    last = T
    if CAUSAL and TRANSPOSED:
        first = block * BLOCK_M // BLOCK_N * BLOCK_N
    if CAUSAL and not TRANSPOSED:
        last = tl.minimum((block + 1) * BLOCK_M, T)
    return first, last


@jit
def score_tile(
    x, y, bias, x_tile, rows, others, T, score_scale,
    S: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """X, or X^T if the bias is transposed too, at [rows, others]: products of x and y, [T, s] both.

    The first BLOCK_S columns of x are in x_tile.
    """
    columns = tl.arange(0, BLOCK_S)
    scores = tl.dot(x_tile, tl.trans(load_tile(y, others, columns, T, S, COMPUTE)), input_precision=PRECISION)
    if S > BLOCK_S:
        for start in range(BLOCK_S, S, BLOCK_S):
            x_part = load_tile(x, rows, start + columns, T, S, COMPUTE)
            y_part = load_tile(y, others, start + columns, T, S, COMPUTE)
            scores = add_product(scores, x_part, tl.trans(y_part), PRECISION)
    scores *= score_scale
    if HAS_BIAS:
        scores += load_tile(bias, rows, others, T, T, scores.dtype)
    return scores


@jit
def mask_tile(tile, rows, others, row_scale, T, CAUSAL: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The tile times the row_scale of its queries, zero where attention is causal and the key is later than the query."""
    # Beyond the edges nothing needs a mask: values and output gradients read as zero there.
    if TRANSPOSED:
        tile *= tl.load(row_scale + others, mask=others < T, other=0.0)[None, :]
        if CAUSAL:
            tile = tl.where(rows[:, None] <= others[None, :], tile, 0.0)
    else:
        tile *= tl.load(row_scale + rows, mask=rows < T, other=0.0)[:, None]
        if CAUSAL:
            tile = tl.where(rows[:, None] >= others[None, :], tile, 0.0)
    return tile


@jit
def score_gradient_tile(
    scores, x_values, y_values, row_scale, rows, others, T,
    E: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, TRANSPOSED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dX, or dX^T, at [rows, others]; of the values v and the gradients dout, [T, e] both, x_values are those of the rows."""
    columns = tl.arange(0, BLOCK_E)
    products = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC)
    for start in range(0, E, BLOCK_E):
        x_part = load_tile(x_values, rows, start + columns, T, E, COMPUTE)
        y_part = load_tile(y_values, others, start + columns, T, E, COMPUTE)
        products = add_product(products, x_part, tl.trans(y_part), PRECISION)
    return mask_tile(products * activation_slope(scores, ACTIVATION), rows, others, row_scale, T, CAUSAL, TRANSPOSED)
