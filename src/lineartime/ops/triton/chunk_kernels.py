"""The kernel of mixed chunk attention: the products of the weights of every chunk, and of its state.

    out[g] = P[g] v[g] + readers[g] states[g]        dv[h] = P[h]^T dout[h] + readers[h] states[h]

Shapes: N chunks of the batch, C tokens each, s query/key width, e value width. The weights P [N, C, C] are those of
score_kernels.py. They are smaller than the values where C < e, as in all presets, but large for chunks of thousands of tokens.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton import state_dtype, workspace
from lineartime.ops.triton.common import (
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
)


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


def read_chunks_is_unfit(sizes: dict[str, Any]) -> bool:
    """Whether these blocks are too large for `read_chunks_kernel`."""
    return bool(sizes["IN_REGISTERS"] and sizes["TRANSPOSED"] and sizes["BLOCK_M"] * sizes["BLOCK_E"] > 128 * 128)


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


# States: M and N -------------------------------------------------------------------------------------------------------


@jit
def chunk_at(order, first, n_chunks, BACKWARDS: tl.constexpr):
    """The chunks of these numbers in a document, counted from its end if BACKWARDS, and whether they exist."""
    there = (order >= 0) & (order < n_chunks)
    if BACKWARDS:
        order = n_chunks - 1 - order
    return first + order, there


@tuned(
    [triton.Config({"CHUNKS": 8, "BLOCK": 512}, num_warps=4, num_stages=1)],
    key=[],
    interpreted={"CHUNKS": 2, "BLOCK": 256},
)
@jit
def add_up_kernel(
    sums, state_scale, document_starts, before, after, out, n_documents, G, SIZE,
    CAUSAL: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_SUMMARY: tl.constexpr, ACC: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """M, or, TRANSPOSED, N of the sums of every chunk. One program computes BLOCK elements of the states of one document.

    If it HAS_SUMMARY, every row of the batch is one document, whose sum starts from `before` and ends as `after`.
    """
    BACKWARDS: tl.constexpr = CAUSAL and TRANSPOSED  # the chunks that read a chunk come after it
    document = tl.program_id(0) % n_documents
    start_chunk = tl.load(document_starts + document)
    n_chunks = tl.load(document_starts + document + 1) - start_chunk
    row = (tl.program_id(0) // n_documents).to(tl.int64)
    first = row * G + start_chunk
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (numbers < SIZE)[None, :]
    total = tl.full((BLOCK,), 0.0, ACC)
    stop = n_chunks
    if HAS_SUMMARY:
        total += tl.load(before + row * SIZE + numbers, mask=numbers < SIZE, other=0.0)
        stop += 1  # no chunk reads the last one, but the summary contains it

    for start in range(0, stop, CHUNKS):
        order = start + tl.arange(0, CHUNKS)
        if CAUSAL:
            # Sum only the chunks before: subtracting a chunk's own sum from a total would give infinity - infinity = NaN.
            chunks, there = chunk_at(order - 1, first, n_chunks, BACKWARDS)
        else:
            chunks, there = chunk_at(order, first, n_chunks, BACKWARDS)
        tile = tl.load(sums + chunks[:, None] * SIZE + numbers[None, :], mask=there[:, None] & inside, other=0.0).to(ACC)
        if TRANSPOSED:
            tile *= tl.load(state_scale + chunks, mask=there, other=0.0)[:, None]
        if CAUSAL:
            chunks, there = chunk_at(order, first, n_chunks, BACKWARDS)
            state = total[None, :] + tl.cumsum(tile, 0)
            if not TRANSPOSED:
                state *= tl.load(state_scale + chunks, mask=there, other=0.0)[:, None]
            tl.store(
                out + chunks[:, None] * SIZE + numbers[None, :], state.to(out.dtype.element_ty), mask=there[:, None] & inside
            )
        total += tl.sum(tile, 0)
    if HAS_SUMMARY:
        tl.store(after + row * SIZE + numbers, total, mask=numbers < SIZE)

    if not CAUSAL:
        for start in range(0, n_chunks, CHUNKS):
            chunks, there = chunk_at(start + tl.arange(0, CHUNKS), first, n_chunks, BACKWARDS)
            state = total[None, :] + tl.full((CHUNKS, BLOCK), 0.0, ACC)
            if not TRANSPOSED:
                state *= tl.load(state_scale + chunks, mask=there, other=0.0)[:, None]
            tl.store(
                out + chunks[:, None] * SIZE + numbers[None, :], state.to(out.dtype.element_ty), mask=there[:, None] & inside
            )


class Summary(NamedTuple):
    """The sum of k_lin^T v over the chunks of a stream, in float32 or better.

    Attributes:
        before: [B, s, e], over the chunks before the first one here.
        after: [B, s, e], memory for the sum up to the last one.
    """

    before: Tensor
    after: Tensor


def chunk_states(
    x: Tensor, values: Tensor, state_scale: Tensor, document_starts: Tensor, *, causal: bool, transposed: bool,
    summary: Summary | None = None,
) -> Tensor:  # fmt: skip
    """M of k_lin and v or, transposed, N of q_lin and dout: [B, G, C, s], [B, G, C, e] -> [B, G, s, e].

    With a summary, every row is one causal document, and its chunks also read the sum over those before it.
    In two phases, so that one long sequence, too, keeps all of a GPU busy: the products of all chunks, and their sums.
    """
    dtype = state_dtype(values.dtype)
    sums = x.mT.to(dtype) @ values.to(dtype)
    batch, n_chunks, size = *sums.shape[:2], sums.shape[2] * sums.shape[3]
    out, n_documents = workspace(sums.shape, dtype, values.device), len(document_starts) - 1

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return batch * n_documents, triton.cdiv(size, config["BLOCK"])

    with on_device(values):
        add_up_kernel[grid](
            sums, state_scale, document_starts, *(summary or (None, None)), out, n_documents, n_chunks, size,
            CAUSAL=causal, TRANSPOSED=transposed, HAS_SUMMARY=summary is not None, ACC=number_formats(values.dtype)["ACC"],
        )  # fmt: skip
    return out
