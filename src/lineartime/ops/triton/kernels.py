"""The Triton kernels: attention weights, their gradients, and cross-entropy. Triton may be absent: import this where needed.

Shapes: N sequences, T tokens, s query/key width, e value width, V vocabulary. Of a sequence, a kernel computes some queries and
some keys.

    P[t, j] = r[t] f(X[t, j])        dX[t, j] = r[t] f'(X[t, j]) dout[t].v[j]        X[t, j] = c q[t].k[j] + bias[j - t]

    relu2:    f(x) = max(x, 0)^2                                   f'(x) = 2 max(x, 0)
    laplace:  f(x) = (1 + erf(sqrt(2 pi) (x - sqrt(1/2)))) / 2     f'(x) = sqrt(2) exp(-2 pi (x - sqrt(1/2))^2)

    loss[t] = logsumexp(x[t]) - x[t, target[t]]        dx[t] = softmax(x[t]) - one_hot(target[t])        0 for an ignored target

with r = row_scale, c = score_scale, and P = dX = 0 at j > t where attention is causal. P and dX go to memory: the products that
they enter, with the wide values above all, would otherwise compute them again for each block of columns. Attention takes a part
of the pairs at a time. The gradient of the cross-entropy takes the place of the logits: each is read twice and written once.

A kernel sees row-major matrices [n_rows, n_columns] and works on tiles of them. What lies beyond the edges of a matrix reads as
zero and is never written, so sizes need not be multiples of anything.
"""

# Triton has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton.quadratic import workspace

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run as Python on the CPU: set by the environment variable TRITON_INTERPRET when they are imported."""

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""`triton.jit`, with a type."""


def number_formats(dtype: torch.dtype) -> dict[str, Any]:
    """The constants that tell a kernel how to multiply tiles of `dtype`: COMPUTE, the operands', ACC, the sums', PRECISION.

    float32 is multiplied as three products of tf32 where PyTorch is told to be exact: as exact as a sum in float32 and, unlike
    exact products, made for the tensor cores. float16 is widened to float32, because a squared score overflows it.
    """
    if dtype == torch.bfloat16:
        return {"COMPUTE": tl.bfloat16, "ACC": tl.float32, "PRECISION": "ieee"}
    if dtype == torch.float64:
        return {"COMPUTE": tl.float64, "ACC": tl.float64, "PRECISION": "ieee"}
    # torch.get_float32_matmul_precision may raise where a program has set the newer option.
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    return {"COMPUTE": tl.float32, "ACC": tl.float32, "PRECISION": "tf32x3" if exact else "tf32"}


def width_block(width: int, dtype: torch.dtype) -> int:
    """The columns of queries and keys that a kernel holds at a time: all of them, as far as shared memory has room."""
    padded: int = triton.next_power_of_2(max(width, 16))
    if INTERPRETED:
        return min(padded, 32)
    if dtype != torch.bfloat16:
        return min(padded, 64)
    return padded if padded <= 256 else 128


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on the device of the tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch_sizes(
    blocks: tuple[str, ...], rows: Sequence[tuple[int, ...]], dtype: torch.dtype, pairs: tuple[int, int],
    unfit: Callable[[dict[str, int], bool], bool],
) -> dict[str, int]:  # fmt: skip
    """The sizes of blocks, the warps and the stages of a launch: those of the first row that fits, and the last if none does.

    They depend on the kind of GPU alone, not on timings: the same inputs give the same bits on all GPUs of a kind.

    Args:
        blocks: the names of the blocks.
        rows: their sizes, the warps and the stages, the preferred ones first.
        dtype: that of the inputs.
        pairs: how many queries and keys the launch computes.
        unfit: whether sizes need too many registers or too much shared memory, where tensor cores read what they multiply from
            registers, if the second argument says so, or from shared memory, which leaves more registers for sums.
    """
    if INTERPRETED:
        return dict.fromkeys(blocks, 32)
    target = triton.runtime.driver.active.get_current_target()
    in_registers = target.backend == "cuda" and target.arch // 10 not in (9, 10)
    largest = 64 if dtype != torch.bfloat16 or min(pairs) <= 64 else 128
    found: dict[str, int] = {}
    for *sizes, warps, stages in rows:
        found = {**dict(zip(blocks, sizes, strict=True)), "num_warps": warps, "num_stages": stages}
        if max(sizes) <= largest and not unfit(found, in_registers):
            break
    return found


_LAPLACE_MEAN = tl.constexpr(math.sqrt(1 / 2))
_LAPLACE_STEEPNESS = tl.constexpr(math.sqrt(2 * math.pi))
_LAPLACE_PEAK = tl.constexpr(math.sqrt(2))


@jit
def load_tile(matrix, rows, columns, n_rows, n_columns, DTYPE: tl.constexpr):
    """matrix[rows, columns], zero beyond the edges."""
    # In 64 bits, because a long sequence of wide values has more than 2^31 elements.
    offsets = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(matrix + offsets, mask=inside, other=0.0).to(DTYPE)


@jit
def store_tile(matrix, tile, rows, columns, n_rows, n_columns):
    """matrix[rows, columns] = tile, within the edges."""
    offsets = rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tl.store(matrix + offsets, tile.to(matrix.dtype.element_ty), mask=inside)


@jit
def add_product(total, a, b, PRECISION: tl.constexpr):
    """Total + a b."""
    # Triton 3.6 takes float32 for the dtype of every sum, unless told.
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@jit
def relu(x):
    """max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@jit
def activate(scores, ACTIVATION: tl.constexpr):
    """f(scores)."""
    if ACTIVATION == "relu2":
        positive = relu(scores)
        weights = positive * positive
    else:
        weights = 0.5 * (1.0 + tl.erf((scores - _LAPLACE_MEAN) * _LAPLACE_STEEPNESS))
    return weights


@jit
def activation_slope(scores, ACTIVATION: tl.constexpr):
    """f'(scores)."""
    if ACTIVATION == "relu2":
        slopes = 2.0 * relu(scores)
    else:
        distance = (scores - _LAPLACE_MEAN) * _LAPLACE_STEEPNESS
        slopes = _LAPLACE_PEAK * tl.exp(-distance * distance)
    return slopes


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
    dtype: torch.dtype, pairs: Pairs,
) -> Tensor:  # fmt: skip
    """P of some pairs of queries and keys [N, T, s], in `dtype`."""
    n_sequences, length, width = q.shape
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
        products, features = tl.full((BLOCK_M, BLOCK_N), 0.0, ACC), tl.arange(0, BLOCK_E)
        for start in range(0, E, BLOCK_E):
            of_queries = load_tile(d_out, queries, start + features, T, E, COMPUTE)
            of_keys = load_tile(v, keys, start + features, T, E, COMPUTE)
            products = add_product(products, of_queries, tl.trans(of_keys), PRECISION)
        products *= activation_slope(scores, ACTIVATION)
        d_tile += mask_tile(products, queries, keys, row_scale + sequence * T, T, CAUSAL)
    store_tile(d_scores, d_tile, rows, columns, n_queries, n_keys)


def score_gradient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, row_scale: Tensor, d_out: Tensor, score_scale: float, *,
    causal: bool, activation: str, dtype: torch.dtype, pairs: Pairs,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """P and dX of some pairs of queries and keys [N, T, s], with values and output gradients [N, T, e], in `dtype`."""
    (n_sequences, length, width), n_columns = q.shape, v.shape[-1]
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


@jit
def cross_entropy_kernel(
    logits, targets, losses, V,
    IGNORED: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one token; if KEEP, its logits are overwritten with their gradient. One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    # Before the maximum: it is a barrier, after which another thread may have overwritten this logit. Outside the vocabulary
    # is NaN.
    chosen = tl.load(logits + target, mask=(target >= 0) & (target < V), other=float("nan")).to(ACC)

    peak = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tile = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(ACC)
        higher = tl.maximum(peak, tl.max(tile, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(tile - higher), 0)
        peak = higher
    log_sum = peak + tl.log(total)
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, log_sum - chosen))

    if KEEP:
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tile = tl.load(logits + columns, mask=columns < V, other=0.0).to(ACC)
            gradient = tl.exp(tile - log_sum) - tl.where(columns == target, 1.0, 0.0)
            gradient = tl.where(target == IGNORED, 0.0, gradient)
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < V)


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int, keep: bool) -> Tensor:
    """The losses [n] of contiguous logits [n, V], in float32 or better; puts their gradient in place of the logits if kept.

    A target outside the vocabulary gives NaN.
    """
    n_tokens, vocabulary = logits.shape
    exact = torch.promote_types(logits.dtype, torch.float32)
    losses = workspace((n_tokens,), exact, logits.device)
    if n_tokens:
        sizes = {"BLOCK": 32} if INTERPRETED else {"BLOCK": 4096, "num_warps": 8, "num_stages": 1}
        with on_device(logits):
            cross_entropy_kernel[(n_tokens,)](
                logits, targets.contiguous(), losses, vocabulary,
                IGNORED=ignored, KEEP=keep, ACC=tl.float64 if exact == torch.float64 else tl.float32, **sizes,
            )  # fmt: skip
    return losses
