"""The kernels around the attention of a FLASH layer: from projected tokens to queries, keys and values, and the gradients.

Shapes: R rows, e value width, s query/key width, W = 2 e + s; the formulas are in mixed_chunk/triton.py.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803, N806

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton import state_dtype, workspace
from lineartime.ops.triton.common import jit, number_formats, on_device, silu, silu_slope, tuned

# 1. Kernels -----------------------------------------------------------------------------------------------------------


def in_blocks_of(rows: int) -> Callable[[Any], Any]:
    """The configuration of a kernel that multiplies nothing: blocks of so many rows; there is nothing to tune."""
    config = triton.Config({"BLOCK_R": rows, "BLOCK_E": 128}, num_warps=4, num_stages=1)
    return tuned([config], key=[], interpreted={"BLOCK_R": 64, "BLOCK_E": 64})


@jit
def load_part(matrix, first, rows, columns, R, last, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """matrix[first + rows, columns] of a matrix of WIDTH columns, zero from row first + R and from the column `last` on."""
    offsets = (rows.to(tl.int64) + first)[:, None] * WIDTH + columns[None, :]
    return tl.load(matrix + offsets, mask=(rows < R)[:, None] & (columns < last)[None, :], other=0.0).to(ACC)


@jit
def store_part(matrix, tile, first, rows, columns, R, last, WIDTH: tl.constexpr):
    """matrix[first + rows, columns] = tile, before row first + R and the column `last`."""
    offsets = (rows.to(tl.int64) + first)[:, None] * WIDTH + columns[None, :]
    tl.store(matrix + offsets, tile.to(matrix.dtype.element_ty), mask=(rows < R)[:, None] & (columns < last)[None, :])


@jit
def load_rotations(rotations, rows, pairs, R, n_rotated, HALF: tl.constexpr, ACC: tl.constexpr):
    """Cosines and sines for these rows; the tables [n_rotated, HALF] repeat for every row of the batch, or do not."""
    own = rows % n_rotated
    inside = (rows < R)[:, None] & (pairs < HALF)[None, :]
    cos = tl.load(rotations + own.to(tl.int64)[:, None] * HALF + pairs[None, :], mask=inside, other=0.0).to(ACC)
    sin = tl.load(rotations + (own.to(tl.int64) + n_rotated)[:, None] * HALF + pairs[None, :], mask=inside, other=0.0).to(ACC)
    return cos, sin


@jit
def load_row(table, number, columns, last, WIDTH: tl.constexpr):
    """Row `number` of a table [n, WIDTH], zero from the column `last` on."""
    return tl.load(table + number * WIDTH + columns, mask=columns < last, other=0.0)


@in_blocks_of(32)
@jit
def open_kernel(
    tokens, gamma, beta, rotations, real, v, maps, R, n_rotated,
    S: tl.constexpr, E: tl.constexpr, HAS_ROTATIONS: tl.constexpr, HAS_REAL: tl.constexpr, ACC: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """V [R, e] and the maps [4, R, s]. One program computes a tile of V, or the same tile of all maps.

    The columns of a map have two halves, which rotations turn into each other. A program computes the same columns of both.
    """
    WIDTH: tl.constexpr = 2 * E + S
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = rows < R
    if HAS_REAL:
        there = tl.load(real + rows, mask=there, other=0) != 0
    if tl.program_id(1) >= H_BLOCKS:
        columns = (tl.program_id(1) - H_BLOCKS) * BLOCK_E + tl.arange(0, BLOCK_E)
        value = silu(load_part(tokens, 0, rows, E + columns, R, 2 * E, WIDTH, ACC))
        store_part(v, tl.where(there[:, None], value, 0.0), 0, rows, columns, R, E, E)
    else:
        lower = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        upper = HALF + lower
        z_lower = silu(load_part(tokens, 0, rows, 2 * E + lower, R, 2 * E + HALF, WIDTH, ACC))
        z_upper = silu(load_part(tokens, 0, rows, 2 * E + upper, R, WIDTH, WIDTH, ACC))
        if HAS_ROTATIONS:
            cos, sin = load_rotations(rotations, rows, lower, R, n_rotated, HALF, ACC)
        for number in tl.static_range(4):
            x = z_lower * load_row(gamma, number, lower, HALF, S)[None, :] + load_row(beta, number, lower, HALF, S)[None, :]
            y = z_upper * load_row(gamma, number, upper, S, S)[None, :] + load_row(beta, number, upper, S, S)[None, :]
            if HAS_ROTATIONS:
                turned = x * cos - y * sin
                y = y * cos + x * sin
                x = turned
            if number == 3:  # k_lin, of which a slot without a token adds nothing to the sums
                x = tl.where(there[:, None], x, 0.0)
                y = tl.where(there[:, None], y, 0.0)
            store_part(maps, x, number * R, rows, lower, R, HALF, S)
            store_part(maps, y, number * R, rows, upper, R, S, S)


@in_blocks_of(32)
@jit
def gate_kernel(
    x, tokens, attended, out, d_tokens, R,
    S: tl.constexpr, E: tl.constexpr, HAS_GRADIENT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`x` times the gate, [R, e]; if x is the gradient of the output, also that of the first e columns of the tokens."""
    WIDTH: tl.constexpr = 2 * E + S
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    factor = load_part(x, 0, rows, columns, R, E, E, ACC)
    gate = load_part(tokens, 0, rows, columns, R, E, WIDTH, ACC)
    store_part(out, factor * silu(gate), 0, rows, columns, R, E, E)
    if HAS_GRADIENT:
        read = load_part(attended, 0, rows, columns, R, E, E, ACC)
        store_part(d_tokens, factor * read * silu_slope(gate), 0, rows, columns, R, E, WIDTH)


@in_blocks_of(16)
@jit
def open_gradient_kernel(
    tokens, gamma, rotations, d_v, d_q_quad, d_k_quad, d_q_lin, d_k_lin, d_tokens, d_gamma, d_beta, R, n_rotated,
    S: tl.constexpr, E: tl.constexpr, HAS_ROTATIONS: tl.constexpr, ACC: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, H_BLOCKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradients of all but the first e columns of the tokens, and of gamma and beta: their sums over each block of rows.

    Programs as in `open_kernel`; d_gamma and d_beta are [blocks, 4, s].
    """
    WIDTH: tl.constexpr = 2 * E + S
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    if tl.program_id(1) >= H_BLOCKS:
        columns = (tl.program_id(1) - H_BLOCKS) * BLOCK_E + tl.arange(0, BLOCK_E)
        slope = silu_slope(load_part(tokens, 0, rows, E + columns, R, 2 * E, WIDTH, ACC))
        gradient = load_part(d_v, 0, rows, columns, R, E, E, ACC) * slope
        store_part(d_tokens, gradient, 0, rows, E + columns, R, 2 * E, WIDTH)
    else:
        lower = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        upper = HALF + lower
        x_lower = load_part(tokens, 0, rows, 2 * E + lower, R, 2 * E + HALF, WIDTH, ACC)
        x_upper = load_part(tokens, 0, rows, 2 * E + upper, R, WIDTH, WIDTH, ACC)
        if HAS_ROTATIONS:
            cos, sin = load_rotations(rotations, rows, lower, R, n_rotated, HALF, ACC)
        dz_lower = tl.full((BLOCK_R, BLOCK_H), 0.0, ACC)
        dz_upper = tl.full((BLOCK_R, BLOCK_H), 0.0, ACC)
        for number in tl.static_range(4):
            if number == 0:
                of_map = d_q_quad
            elif number == 1:
                of_map = d_k_quad
            elif number == 2:
                of_map = d_q_lin
            else:
                of_map = d_k_lin
            dx = load_part(of_map, 0, rows, lower, R, HALF, S, ACC)
            dy = load_part(of_map, 0, rows, upper, R, S, S, ACC)
            if HAS_ROTATIONS:
                turned = dx * cos + dy * sin
                dy = dy * cos - dx * sin
                dx = turned
            place = (tl.program_id(0) * 4 + number) * S
            tl.store(d_gamma + place + lower, tl.sum(dx * silu(x_lower), 0), mask=lower < HALF)
            tl.store(d_gamma + place + upper, tl.sum(dy * silu(x_upper), 0), mask=upper < S)
            tl.store(d_beta + place + lower, tl.sum(dx, 0), mask=lower < HALF)
            tl.store(d_beta + place + upper, tl.sum(dy, 0), mask=upper < S)
            dz_lower += dx * load_row(gamma, number, lower, HALF, S)[None, :]
            dz_upper += dy * load_row(gamma, number, upper, S, S)[None, :]
        store_part(d_tokens, dz_lower * silu_slope(x_lower), 0, rows, 2 * E + lower, R, 2 * E + HALF, WIDTH)
        store_part(d_tokens, dz_upper * silu_slope(x_upper), 0, rows, 2 * E + upper, R, WIDTH, WIDTH)


# 2. Their launches ----------------------------------------------------------------------------------------------------


def _sizes(tokens: Tensor, gamma: Tensor, rotations: Tensor | None) -> dict[str, Any]:
    """The constants of the kernels. An odd s has no rotations; its lower half has one column more than its upper half."""
    width, d_qk = tokens.shape[-1], gamma.shape[1]
    half = (d_qk + 1) // 2
    block = min(64, triton.next_power_of_2(half))
    return {
        "S": d_qk,
        "E": (width - d_qk) // 2,
        "HAS_ROTATIONS": rotations is not None,
        "ACC": number_formats(tokens.dtype)["ACC"],
        "HALF": half,
        "BLOCK_H": block,
        "H_BLOCKS": triton.cdiv(half, block),
    }


def _rotated_rows(rotations: Tensor | None) -> int:
    return 1 if rotations is None else rotations[0, ..., 0].numel()


def open_tokens(
    tokens: Tensor, gamma: Tensor, beta: Tensor, rotations: Tensor | None, real: Tensor | None
) -> tuple[Tensor, Tensor]:
    """V [B, G, C, e] and the maps [4, B, G, C, s] of tokens [B, G, C, W]; V and k_lin are zero where `real` is False.

    Those of float16 are float32, as plain PyTorch has them: rounded, they would take digits off every result.
    """
    sizes, (*shape, _) = _sizes(tokens, gamma, rotations), tokens.shape
    n_rows = tokens[..., 0].numel()
    dtype = state_dtype(tokens.dtype)
    v = workspace((*shape, sizes["E"]), dtype, tokens.device)
    maps = workspace((4, *shape, sizes["S"]), dtype, tokens.device)

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(n_rows, config["BLOCK_R"]), sizes["H_BLOCKS"] + triton.cdiv(sizes["E"], config["BLOCK_E"])

    with on_device(tokens):
        open_kernel[grid](
            tokens, gamma, beta, rotations, real, v, maps, n_rows, _rotated_rows(rotations), HAS_REAL=real is not None, **sizes
        )  # fmt: skip
    return v, maps


def gate(attended: Tensor, tokens: Tensor, d_qk: int) -> Tensor:
    """The attention's output times silu of the gate, [B, G, C, e], in the dtype of the tokens."""
    return _gate(attended, tokens, d_qk, tokens.dtype)


def gate_gradient(d_out: Tensor, tokens: Tensor, attended: Tensor, d_tokens: Tensor, d_qk: int) -> Tensor:
    """The gradient of the attention's output, [B, G, C, e]; writes that of the gate's columns into `d_tokens`."""
    return _gate(d_out, tokens, d_qk, attended.dtype, attended, d_tokens)


def _gate(
    x: Tensor, tokens: Tensor, d_qk: int, dtype: torch.dtype, attended: Tensor | None = None, d_tokens: Tensor | None = None
) -> Tensor:
    out, n_rows, width = workspace(x.shape, dtype, x.device), tokens[..., 0].numel(), x.shape[-1]

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(n_rows, config["BLOCK_R"]), triton.cdiv(width, config["BLOCK_E"])

    with on_device(tokens):
        gate_kernel[grid](
            x, tokens, attended, out, d_tokens, n_rows,
            S=d_qk, E=width, HAS_GRADIENT=attended is not None, ACC=number_formats(tokens.dtype)["ACC"],
        )  # fmt: skip
    return out


def open_gradient(
    tokens: Tensor, gamma: Tensor, rotations: Tensor | None, d_v: Tensor, d_maps: Sequence[Tensor], d_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of gamma and beta, [4, s]; writes those of the columns of V and Z into `d_tokens`."""
    sizes, n_rows = _sizes(tokens, gamma, rotations), tokens[..., 0].numel()
    config = open_gradient_kernel.configs[0]
    n_blocks = triton.cdiv(n_rows, config.kwargs["BLOCK_R"])
    d_gamma, d_beta = (workspace((n_blocks, *gamma.shape), gamma.dtype, gamma.device) for _ in range(2))
    grid = (n_blocks, sizes["H_BLOCKS"] + triton.cdiv(sizes["E"], config.kwargs["BLOCK_E"]))
    with on_device(tokens):
        open_gradient_kernel[grid](
            tokens, gamma, rotations, d_v, *d_maps, d_tokens, d_gamma, d_beta, n_rows, _rotated_rows(rotations), **sizes
        )  # fmt: skip
    return d_gamma.sum(0), d_beta.sum(0)
