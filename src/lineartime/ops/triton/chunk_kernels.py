"""The kernel of the states of mixed chunk attention, M and N of mixed_chunk/triton.py: the sums over the chunks that each sees.

Shapes: B batch, G chunks of all documents, C chunk size, s query/key width, e value width.
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803, N806

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton import state_dtype, workspace
from lineartime.ops.triton.common import jit, number_formats, on_device, tuned


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
