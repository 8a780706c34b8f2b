"""Which precision an op computes in."""

from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """Whether the device computes in float64; Apple's GPUs do not."""
    return device.type != "mps"


def matmul_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype an op multiplies matrices in: that of its inputs, or of autocast where it is on.

    Never float16: a score above 256 overflows once squared, so float16 inputs are multiplied in float32.
    """
    dtype = common_dtype(*tensors)
    return torch.float32 if dtype == torch.float16 else dtype


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype that holds all of them, or that of autocast where it is on: for kernels, which convert float16 themselves."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return dtype if dtype == torch.float64 else autocast_dtype(tensors[0]) or dtype


def acc_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that sums of such numbers are accumulated in: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def output_dtype(values: Tensor, compute: torch.dtype) -> torch.dtype:
    """The dtype an op returns: that of its values, except under autocast, where the computed one is kept."""
    return values.dtype if autocast_dtype(values) is None else compute


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which the op alone decides about dtypes."""
    if not torch.amp.is_autocast_available(tensor.device.type):  # the meta device, for instance, knows no autocast
        return nullcontext()
    return torch.autocast(tensor.device.type, enabled=False)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of a tensor, or None where autocast is off."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None
