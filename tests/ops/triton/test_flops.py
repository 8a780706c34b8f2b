"""What FlopCounterMode counts for the kernels. On the meta device, the operators have shapes and run nothing."""

import torch
from torch.utils.flop_counter import FlopCounterMode

import lineartime.ops  # noqa: F401  # defines the operators


def test_the_kernels_count_the_products_they_compute() -> None:
    rows, length, d_qk, d_value = 3, 300, 8, 24
    chunks, chunk_size = 5, 16
    q, v = torch.zeros(rows, length, d_qk, device="meta"), torch.zeros(rows, length, d_value, device="meta")
    scale = torch.zeros(rows, length, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.ops.lineartime.triton_quadratic(q, q, v, None, scale, 1.0, False, "relu2", True)
    assert counter.get_total_flops() == 2 * rows * length * length * (d_qk + d_value)
    with FlopCounterMode(display=False) as counter:
        torch.ops.lineartime.triton_quadratic_backward(v, q, q, v, None, scale, 1.0, False, "relu2", [True] * 3 + [False])
    assert counter.get_total_flops() == 2 * rows * length * length * (5 * d_qk + 3 * d_value)

    q, v = (torch.zeros(rows, chunks, chunk_size, width, device="meta") for width in (d_qk, d_value))
    row, state, starts = (torch.zeros(size, device="meta") for size in ((1, 1, 1), (1, chunks), (2,)))
    sums = torch.zeros(rows, chunks, d_qk, d_value, device="meta")
    inside, across = 2 * rows * chunks * chunk_size**2, 2 * rows * chunks * chunk_size * d_qk * d_value
    with FlopCounterMode(display=False) as counter:
        torch.ops.lineartime.triton_mixed_chunk(q, q, q, q, v, None, row, state, starts, 1.0, True, "relu2", True)
    assert counter.get_total_flops() == inside * (d_qk + d_value) + 2 * across
    with FlopCounterMode(display=False) as counter:
        torch.ops.lineartime.triton_mixed_chunk_backward(
            v, sums, q, q, q, q, v, None, row, state, starts, 1.0, True, "relu2", [True] * 5 + [False]
        )  # fmt: skip
    assert counter.get_total_flops() == inside * (3 * d_qk + 2 * d_value) + 4 * across
