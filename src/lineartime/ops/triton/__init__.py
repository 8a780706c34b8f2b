"""Kernels for GPUs, and the memory they write to. Triton may be absent, and is imported where a kernel is launched."""

from collections.abc import Sequence

import torch
from torch import Tensor


def workspace(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; every result and every intermediate of the kernels is allocated here."""
    return torch.empty(shape, dtype=dtype, device=device)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of intermediates in memory, for inputs of `dtype`: the same, but float32 instead of float16, for its range."""
    return torch.float32 if dtype == torch.float16 else dtype
