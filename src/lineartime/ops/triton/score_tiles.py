"""Tiles of the scores of attention, and of their gradients: X, P and dX in score_kernels.py."""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

import triton.language as tl

from lineartime.ops.triton.common import activation_slope, add_product, jit, load_tile


@jit
def tile_of_program(n_queries, n_keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The matrix [n_queries, n_keys] of this program, if each has one tile of one matrix, and where the tile starts."""
    query_blocks = (n_queries + BLOCK_M - 1) // BLOCK_M
    key_blocks = (n_keys + BLOCK_N - 1) // BLOCK_N
    matrix = (tl.program_id(0) // (query_blocks * key_blocks)).to(tl.int64)
    block = tl.program_id(0) % (query_blocks * key_blocks)
    return matrix, block // key_blocks * BLOCK_M, block % key_blocks * BLOCK_N


@jit
def score_tile(
    q, k, bias, queries, keys, T, score_scale,
    S: tl.constexpr, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """X at [queries, keys]: products of q and k, [T, S] both."""
    columns = tl.arange(0, BLOCK_S)
    of_queries, of_keys = load_tile(q, queries, columns, T, S, COMPUTE), load_tile(k, keys, columns, T, S, COMPUTE)
    scores = tl.dot(of_queries, tl.trans(of_keys), input_precision=PRECISION)
    if S > BLOCK_S:
        for start in range(BLOCK_S, S, BLOCK_S):
            of_queries = load_tile(q, queries, start + columns, T, S, COMPUTE)
            of_keys = load_tile(k, keys, start + columns, T, S, COMPUTE)
            scores = add_product(scores, of_queries, tl.trans(of_keys), PRECISION)
    scores *= score_scale
    if HAS_BIAS:
        scores += load_tile(bias, queries, keys, T, T, scores.dtype)
    return scores


@jit
def mask_tile(tile, queries, keys, row_scale, T, CAUSAL: tl.constexpr):
    """The tile times the row_scale of its queries, zero where attention is causal and the key is later than the query."""
    tile *= tl.load(row_scale + queries, mask=queries < T, other=0.0)[:, None]
    if CAUSAL:
        tile = tl.where(queries[:, None] >= keys[None, :], tile, 0.0)
    return tile


@jit
def score_gradient_tile(
    scores, d_out, v, row_scale, queries, keys, T,
    E: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`dX` at [queries, keys] of their scores, of values and output gradients [T, E]."""
    columns = tl.arange(0, BLOCK_E)
    products = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC)
    for start in range(0, E, BLOCK_E):
        of_queries = load_tile(d_out, queries, start + columns, T, E, COMPUTE)
        of_keys = load_tile(v, keys, start + columns, T, E, COMPUTE)
        products = add_product(products, of_queries, tl.trans(of_keys), PRECISION)
    return mask_tile(products * activation_slope(scores, ACTIVATION), queries, keys, row_scale, T, CAUSAL)
