"""The choice of the implementation of an op, by device or as requested, and the reasons why one cannot run."""

import importlib.util
import os
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Literal, get_args

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, check_choice
from lineartime.native import why_not_built
from lineartime.ops.activations import Activation
from lineartime.ops.modes import is_exporting, under_transform

Backend = Literal["auto", "torch", "tiled", "triton", "oracle"]
BACKENDS: tuple[str, ...] = get_args(Backend)
"""auto: the fastest that can run. torch: PyTorch's operations on whole sequences, on any device. tiled: the same in tiles that
fit the cache of a CPU. triton: kernels for GPUs. oracle: the definition, slow. Not every op has all of them."""

GPU_LOCK = RLock()
"""Held while a CUDA graph is recorded, which is for one thread of a process at a time."""
_OLD_GPUS: set[int] = set()
"""The GPUs on which the kernels cannot run, known when the first layer is built."""


def choose_backend(
    backend: Backend,
    available: tuple[Backend, ...],
    like: Tensor,
    dtype: torch.dtype,
    activation: Activation,
    source: Path | None = None,
) -> Backend:
    """Choose the implementation to run, which is never "auto".

    Args:
        backend: the requested backend.
        available: the implementations of the op.
        like: a tensor on the device where the op runs.
        dtype: the dtype of the products.
        activation: the activation of the quadratic attention.
        source: the C++ functions that the tiled form needs, which are built; None if it needs none.

    Raises:
        ArgumentError: if the op does not have the backend, or it cannot run here; the message gives the reason.
    """
    if is_exporting():  # a program needs nothing but PyTorch
        return "torch"
    if backend == "auto":
        fastest: Backend = "triton" if like.device.type == "cuda" else "tiled"
        can_run = fastest in available and why_not(fastest, like.device, dtype, activation, source) is None
        return fastest if can_run else "torch"
    check_choice("backend", backend, ("auto", *available))
    reason = why_not(backend, like.device, dtype, activation, source)
    if reason is not None:
        raise ArgumentError("backend", f"is {backend!r}, which cannot run here: {reason}; use 'auto' or 'torch'.")
    return backend


def why_not(
    backend: Backend, device: torch.device, dtype: torch.dtype, activation: Activation, source: Path | None = None
) -> str | None:
    """Why a backend cannot run, as the end of a sentence; None if it can; arguments as for `choose_backend`."""
    if backend not in ("tiled", "triton"):
        return None
    if under_transform():
        return "it has neither forward-mode derivatives nor rules for torch.func"
    if backend == "tiled":
        if device.type != "cpu":
            return f"it is made for CPUs, and the tensors are on {device.type}"
        if activation != "relu2":
            return f"it has no activation {activation!r}, only 'relu2'"
        return None if source is None else why_not_built(source, dtype)
    if not _has_triton():
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a GPU, and the tensors are on {device.type}"
    if dtype == torch.float64 and device.type == "cuda":
        return "it computes in float32, and the tensors are float64"
    if _is_old(device):
        return "it needs a GPU of compute capability 8.0 or more"
    return None if activation in ("relu2", "laplace") else f"it has no activation {activation!r}, only 'relu2' and 'laplace'"


@cache
def note_old_gpus() -> None:
    """Note which GPUs cannot run the kernels, before torch.compile traces what asks for it."""
    if torch.cuda.is_available() and _has_triton():
        _OLD_GPUS.update(index for index in range(torch.cuda.device_count()) if _is_old(torch.device("cuda", index)))


def _is_old(device: torch.device) -> bool:
    """Whether a GPU lacks the units that the kernels need."""
    if device.type != "cuda":
        return False
    if torch.compiler.is_compiling():  # cannot trace a question to the driver, and compiles for older GPUs, too
        return (device.index or 0) in _OLD_GPUS
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0)


def _has_triton() -> bool:
    # The GPU code of torch.compile needs Triton as well, and torch.compile cannot trace importlib.
    return torch.compiler.is_compiling() or importlib.util.find_spec("triton") is not None
