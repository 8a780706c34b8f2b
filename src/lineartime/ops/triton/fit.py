"""Which configurations need too many registers or too much shared memory, as `benchmarks/kernels.py` has found.

Wide queries need more shared memory, and float32 twice the registers. `sizes` holds the arguments of a kernel, its blocks, and
IN_REGISTERS: whether tensor cores read both factors from registers.
"""

# Triton may be absent, and has no types.
# mypy: disable-error-code="import-untyped, import-not-found"

from typing import Any

import triton.language as tl


def attention_weights_is_unfit(sizes: dict[str, Any]) -> bool:
    """Whether these blocks are too large for `attention_weights_kernel`."""
    return bool(sizes["IN_REGISTERS"] and sizes["BLOCK_M"] > (64 if sizes["COMPUTE"] == tl.bfloat16 else 32))


def read_chunks_is_unfit(sizes: dict[str, Any]) -> bool:
    """Whether these blocks are too large for `read_chunks_kernel`."""
    return bool(sizes["IN_REGISTERS"] and sizes["TRANSPOSED"] and sizes["BLOCK_M"] * sizes["BLOCK_E"] > 128 * 128)


def score_gradient_is_unfit(sizes: dict[str, Any]) -> bool:
    """Whether these blocks are too large for `score_gradient_kernel`."""
    return bool(
        ((sizes["S"] > 128 or sizes["IN_REGISTERS"]) and sizes["BLOCK_M"] * sizes["BLOCK_N"] > 128 * 64)
        or (sizes["COMPUTE"] != tl.bfloat16 and sizes["IN_REGISTERS"] and sizes["BLOCK_N"] > 32)
        or (sizes["COMPUTE"] != tl.bfloat16 and sizes["BLOCK_E"] > 32)
    )
