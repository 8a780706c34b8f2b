"""The kernels of mixed chunk attention: the weights of every chunk, and their products with the values.

    P[g, t, j] = row_scale[g, t] f(X[g, t, j])                             X as in quadratic_kernels.py
    out[g] = P[g] v[g] + readers[g] states[g]        dv[h] = P[h]^T dout[h] + readers[h] states[h]

Shapes: N chunks of the batch, C tokens each, s query/key width, e value width. The weights [N, C, C] are in memory for a
moment: each of the blocks of columns that divide the values would have to compute all of them again. They are smaller
than the values where C < e, as in all presets, but large for chunks of thousands of tokens.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

from typing import Any, NamedTuple

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
    silu,
    store_tile,
    token_bucket,
    tuned,
    width_block,
    workspace,
)
from lineartime.ops.triton.fit import chunk_weights_is_unfit, read_chunks_is_unfit
from lineartime.ops.triton.score_tiles import mask_tile, score_tile, tile_of_program, visible_range

# 1. P -----------------------------------------------------------------------------------------------------------------


@tuned(
    configurations(
        ("BLOCK_M", "BLOCK_N"),
        (128, 128, 8, 2),
        (128, 64, 4, 2),
        (64, 64, 4, 2),
        (32, 32, 4, 2),
    ),
    key=["bucket", "tokens", "S", "CAUSAL", "ACTIVATION", "HAS_BIAS", "PRECISION"],
    interpreted={"BLOCK_M": 32, "BLOCK_N": 32},  # smaller than those below, which then read tiles that are all zero
    unfit=chunk_weights_is_unfit,
)
@jit
def chunk_weights_kernel(
    q, k, bias, row_scale, out, T, bucket, tokens, score_scale,
    S: tl.constexpr, CAUSAL: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """P, zeros included. One program computes one tile of one chunk."""
    chunk, row_start, other_start = tile_of_program(T, BLOCK_M, BLOCK_N)
    rows = row_start + tl.arange(0, BLOCK_M)
    others = other_start + tl.arange(0, BLOCK_N)
    q += chunk * T * S
    k += chunk * T * S

    # A loop of one round or none: the products of a tile whose keys all come after its queries are left out.
    visible = 1
    if CAUSAL:
        visible = tl.where(other_start < row_start + BLOCK_M, 1, 0)
    tile = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC)
    for _ in range(0, visible):
        x_tile = load_tile(q, rows, tl.arange(0, BLOCK_S), T, S, COMPUTE)
        scores = score_tile(q, k, bias, x_tile, rows, others, T, score_scale, S, HAS_BIAS, COMPUTE, PRECISION, BLOCK_S)
        tile += mask_tile(activate(scores, ACTIVATION), rows, others, row_scale + chunk * T, T, CAUSAL, False)
    store_tile(out + chunk * T * T, tile, rows, others, T, T)


def chunk_weights(
    q: Tensor, k: Tensor, bias: Tensor | None, row_scale: Tensor, score_scale: float, *, causal: bool, activation: str,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """P of queries and keys [N, C, s]: [N, C, C] in `dtype`."""
    n_chunks, length, width = q.shape
    out = workspace((n_chunks, length, length), dtype, q.device)

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (n_chunks * triton.cdiv(length, config["BLOCK_M"]) * triton.cdiv(length, config["BLOCK_N"]),)

    with on_device(q):
        chunk_weights_kernel[grid](
            q, k, bias, row_scale, out, length, length_bucket(length), token_bucket(n_chunks * length), score_scale,
            S=width, CAUSAL=causal, ACTIVATION=activation, HAS_BIAS=bias is not None,
            BLOCK_S=width_block(width, q.dtype), **number_formats(q.dtype),
        )  # fmt: skip
    return out


# 2. out, and dv -------------------------------------------------------------------------------------------------------


@tuned(
    configurations(
        ("BLOCK_M", "BLOCK_N", "BLOCK_E"),
        (128, 64, 256, 8, 3),
        (128, 64, 128, 8, 3),
        (64, 64, 256, 8, 3),
        (64, 64, 128, 4, 3),
        (64, 32, 64, 4, 3),
        (32, 32, 32, 4, 2),
    ),
    key=["bucket", "tokens", "S", "E", "CAUSAL", "HAS_GATE", "KEEP", "TRANSPOSED", "PRECISION"],
    interpreted={"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_E": 32},
    unfit=read_chunks_is_unfit,
)
@jit
def read_chunks_kernel(
    weights, values, readers, states, gate, attended, out, T, bucket, tokens,
    S: tl.constexpr, E: tl.constexpr, CAUSAL: tl.constexpr, HAS_GATE: tl.constexpr, KEEP: tl.constexpr,
    TRANSPOSED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """P values or P^T values, + readers states, times silu(gate) if given. One program computes a tile of one chunk.

    The gate is the first E columns of a matrix of 2 E + S. If KEEP, `attended` receives what the gate multiplies.
    """
    # Programs side by side have the same rows, whose weights they find in the cache.
    column_blocks = (E + BLOCK_E - 1) // BLOCK_E
    blocks = (T + BLOCK_M - 1) // BLOCK_M
    chunk = (tl.program_id(0) // (blocks * column_blocks)).to(tl.int64)
    block = tl.program_id(0) // column_blocks % blocks
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % column_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    weights += chunk * T * T
    values += chunk * T * E
    readers += chunk * T * S
    states += chunk * S * E

    acc = tl.full((BLOCK_M, BLOCK_E), 0.0, ACC)
    for start in range(0, S, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        reader = load_tile(readers, rows, part, T, S, COMPUTE)
        state = as_operand(load_tile(states, part, columns, S, E, states.dtype.element_ty), COMPUTE, PRECISION)
        acc = add_product(acc, reader, state, PRECISION)

    first, last = visible_range(block, T, CAUSAL, TRANSPOSED, BLOCK_M, BLOCK_N)
    for start in range(first, last, BLOCK_N):
        others = start + tl.arange(0, BLOCK_N)
        if TRANSPOSED:
            tile = tl.trans(load_tile(weights, others, rows, T, T, weights.dtype.element_ty))
        else:
            tile = load_tile(weights, rows, others, T, T, weights.dtype.element_ty)
        value = load_tile(values, others, columns, T, E, COMPUTE)
        acc = add_product(acc, as_operand(tile, COMPUTE, PRECISION), value, PRECISION)

    if KEEP:
        store_tile(attended + chunk * T * E, acc, rows, columns, T, E)
    if HAS_GATE:
        gate += (chunk * T + block * BLOCK_M) * (2 * E + S)
        offsets = tl.arange(0, BLOCK_M)[:, None] * (2 * E + S) + columns[None, :]  # in 32 bits, which take fewer registers
        before = tl.load(gate + offsets, mask=(rows < T)[:, None] & (columns < E)[None, :], other=0.0).to(ACC)
        acc *= silu(before)
    store_tile(out + chunk * T * E, acc, rows, columns, T, E)


class Gate(NamedTuple):
    """What the output of the attention is multiplied by, silu of the gate.

    Attributes:
        tokens: [N, C, 2 e + s], whose first e columns are the gate before SiLU.
        attended: [N, C, e], where the output is to be kept before the gate multiplies it, or None.
    """

    tokens: Tensor
    attended: Tensor | None


def read_chunks(
    weights: Tensor, values: Tensor, readers: Tensor, states: Tensor, *, causal: bool, transposed: bool = False,
    gate: Gate | None = None,
) -> Tensor:  # fmt: skip
    """P values + readers states, times the gate where given: [N, C, C], [N, C, e], [N, C, s], [N, s, e] -> [N, C, e].

    Transposed, P^T values + readers states. Where attention is causal, the weights are zero for keys after their query.
    """
    (n_chunks, length, n_columns), width = values.shape, readers.shape[-1]
    out = workspace(values.shape, values.dtype, values.device)
    tokens, attended = (None, None) if gate is None else gate

    def grid(config: dict[str, Any]) -> tuple[int]:
        return (n_chunks * triton.cdiv(length, config["BLOCK_M"]) * triton.cdiv(n_columns, config["BLOCK_E"]),)

    with on_device(values):
        read_chunks_kernel[grid](
            weights, values, readers, states, tokens, attended, out, length, length_bucket(length),
            token_bucket(n_chunks * length),
            S=width, E=n_columns, CAUSAL=causal, HAS_GATE=gate is not None, KEEP=attended is not None, TRANSPOSED=transposed,
            BLOCK_S=min(32, triton.next_power_of_2(max(width, 16))), **number_formats(values.dtype),
        )  # fmt: skip
    return out
