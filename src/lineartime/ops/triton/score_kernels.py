"""The kernels of everything that has a number for each pair of a query and a key: the weights of attention, and gradients.

Shapes: N sequences, T tokens, s query/key width, e value width. Of a sequence, a kernel computes some queries and some keys.

    P[t, j] = r[t] f(X[t, j])        dX[t, j] = r[t] f'(X[t, j]) dout[t].v[j]        X[t, j] = c q[t].k[j] + bias[j - t]

with r = row_scale, c = score_scale, f the activation, and P = dX = 0 at j > t where attention is causal. Both go to memory: the
products that they enter, with the wide values above all, would otherwise compute them again for each block of columns.
Attention takes a part of the pairs at a time.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton import workspace
from lineartime.ops.triton.common import (
    activate,
    activation_slope,
    add_product,
    jit,
    launch_sizes,
    load_tile,
    number_formats,
    on_device,
    store_tile,
    width_block,
)


class Pairs(NamedTuple):
    """The pairs that a kernel computes: queries from `first_query` to before `last_query`, and keys likewise."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        return self.last_query - self.first_query, self.last_key - self.first_key

    def grid(self, n_sequences: int, sizes: dict[str, int]) -> tuple[int]:
        """The number of tiles of BLOCK_M queries and BLOCK_N keys, a program each."""
        n_queries, n_keys = self.shape
        return (n_sequences * triton.cdiv(n_queries, sizes["BLOCK_M"]) * triton.cdiv(n_keys, sizes["BLOCK_N"]),)


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
        distances = T - 1 + keys[None, :] - queries[:, None]
        inside = (queries[:, None] < T) & (keys[None, :] < T)
        scores += tl.load(bias + distances, mask=inside, other=0.0).to(scores.dtype)
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


@jit
def attention_weights_kernel(
    q, k, bias, row_scale, out, T, first_query, last_query, first_key, last_key, score_scale,
    S: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """P, zeros included. One program computes one tile of one sequence."""
    n_queries, n_keys = last_query - first_query, last_key - first_key
    sequence, query_start, key_start = tile_of_program(n_queries, n_keys, BLOCK_M, BLOCK_N)
    rows, columns = query_start + tl.arange(0, BLOCK_M), key_start + tl.arange(0, BLOCK_N)
    queries, keys = first_query + rows, first_key + columns
    q += sequence * T * S
    k += sequence * T * S

    # A loop of one round or none: the products of a tile whose keys all come after its queries are left out.
    visible = 1
    if CAUSAL:
        visible = tl.where(first_key + key_start < first_query + query_start + BLOCK_M, 1, 0)
    tile = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC)
    for _ in range(0, visible):
        scores = score_tile(q, k, bias, queries, keys, T, score_scale, S, HAS_BIAS, COMPUTE, PRECISION, BLOCK_S)
        tile += mask_tile(activate(scores, ACTIVATION), queries, keys, row_scale + sequence * T, T, CAUSAL)
    store_tile(out + sequence * n_queries * n_keys, tile, rows, columns, n_queries, n_keys)


def attention_weights(
    q: Tensor, k: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, *, causal: bool, activation: str,
    dtype: torch.dtype, pairs: Pairs | None = None,
) -> Tensor:  # fmt: skip
    """P of queries and keys [N, T, s], in `dtype`: [N, T, T], or that of some pairs alone."""
    n_sequences, length, width = q.shape
    pairs = pairs or Pairs(0, length, 0, length)
    out = workspace((n_sequences, *pairs.shape), dtype, q.device)
    rows = (128, 128, 8, 2), (128, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2)
    most = 64 if q.dtype == torch.bfloat16 else 32
    with on_device(q):
        sizes = launch_sizes(
            ("BLOCK_M", "BLOCK_N"), rows, q.dtype, pairs.shape,
            unfit=lambda own, in_registers: in_registers and own["BLOCK_M"] > most,
        )  # fmt: skip
        attention_weights_kernel[pairs.grid(n_sequences, sizes)](
            q, k, bias, row_scale, out, length, *pairs, score_scale,
            S=width, CAUSAL=causal, ACTIVATION=activation, HAS_BIAS=bias is not None,
            BLOCK_S=width_block(width, q.dtype), **number_formats(q.dtype), **sizes,
        )  # fmt: skip
    return out


@jit
def score_gradient_kernel(
    q, k, v, bias, row_scale, d_out, weights, d_scores, T, first_query, last_query, first_key, last_key,
    score_scale,
    S: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """P and dX, zeros included, of the same scores. One program computes one tile of one sequence."""
    n_queries, n_keys = last_query - first_query, last_key - first_key
    sequence, query_start, key_start = tile_of_program(n_queries, n_keys, BLOCK_M, BLOCK_N)
    rows, columns = query_start + tl.arange(0, BLOCK_M), key_start + tl.arange(0, BLOCK_N)
    queries, keys = first_query + rows, first_key + columns
    q += sequence * T * S
    k += sequence * T * S
    v += sequence * T * E
    d_out += sequence * T * E
    weights += sequence * n_queries * n_keys
    d_scores += sequence * n_queries * n_keys

    visible = 1
    if CAUSAL:
        visible = tl.where(first_key + key_start < first_query + query_start + BLOCK_M, 1, 0)
    d_tile = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC)
    for _ in range(visible, 1):
        store_tile(weights, d_tile, rows, columns, n_queries, n_keys)
    for _ in range(0, visible):
        scores = score_tile(q, k, bias, queries, keys, T, score_scale, S, HAS_BIAS, COMPUTE, PRECISION, BLOCK_S)
        tile = mask_tile(activate(scores, ACTIVATION), queries, keys, row_scale + sequence * T, T, CAUSAL)
        store_tile(weights, tile, rows, columns, n_queries, n_keys)
        d_tile += score_gradient_tile(
            scores, d_out, v, row_scale + sequence * T, queries, keys, T,
            E, CAUSAL, ACTIVATION, COMPUTE, PRECISION, ACC, BLOCK_M, BLOCK_N, BLOCK_E,
        )  # fmt: skip
    store_tile(d_scores, d_tile, rows, columns, n_queries, n_keys)


def score_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, d_out: Tensor, score_scale: float, *,
    causal: bool, activation: str, dtype: torch.dtype, pairs: Pairs | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """P and dX of queries and keys [N, T, s], values and output gradients [N, T, e], in `dtype`, as `attention_weights`."""
    (n_sequences, length, width), n_columns = q.shape, v.shape[-1]
    pairs = pairs or Pairs(0, length, 0, length)
    weights, d_scores = (workspace((n_sequences, *pairs.shape), dtype, v.device) for _ in range(2))
    rows = (128, 128, 64, 8, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 3), (64, 64, 32, 4, 2), (64, 32, 32, 4, 2)
    is_wide = v.dtype != torch.bfloat16

    def unfit(own: dict[str, int], in_registers: bool) -> bool:
        crowded = (width > 128 or in_registers) and own["BLOCK_M"] * own["BLOCK_N"] > 128 * 64
        return crowded or (is_wide and (own["BLOCK_E"] > 32 or (in_registers and own["BLOCK_N"] > 32)))

    with on_device(v):
        sizes = launch_sizes(("BLOCK_M", "BLOCK_N", "BLOCK_E"), rows, v.dtype, pairs.shape, unfit)
        score_gradient_kernel[pairs.grid(n_sequences, sizes)](
            q, k, v, bias, row_scale, d_out, weights, d_scores, length, *pairs, score_scale,
            S=width, E=n_columns, CAUSAL=causal, ACTIVATION=activation, HAS_BIAS=bias is not None,
            BLOCK_S=width_block(width, v.dtype), **number_formats(v.dtype), **sizes,
        )  # fmt: skip
    return weights, d_scores
