"""Device, precision and compilation: what suits this machine, and so what "auto" chooses."""

import shutil
import timeit
from contextlib import AbstractContextManager
from typing import Literal

import torch

from lineartime.choices import Device, Precision
from lineartime.errors import ArgumentError

_COMPILE_SECONDS = {"cpu": 13.0, "cuda": 90.0}
"""The time that torch.compile takes: on a CPU, the longest that benchmarks/speed.py measured; on a GPU, an estimate."""
_COMPILE_SAVING = {"cpu": 0.03, "cuda": 0.30}
"""The share of a step that compiling saves: on a CPU, measured on Transformer++ (FLASH gains less); on a GPU, an estimate."""
_EAGER_FLOPS = {"cpu": 1.5e11, "cuda": 1.0e14}
"""Operations per second of eager training steps, to estimate how long a run takes."""
_FASTER = 0.8
"""bf16 is faster below this share of the time in fp32. CPUs gain a factor of 4 or lose up to 90, so noise does no harm."""


def choose_device(device: Device, local_rank: int = 0) -> torch.device:
    """The device to compute on: of several GPUs, the one of this process.

    Raises:
        ArgumentError: if PyTorch sees no GPU, or none for this process.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", "is cuda, but PyTorch sees no GPU here: use cpu.")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ArgumentError(
            "device",
            f"is {device}, but process {local_rank} has no GPU: start at most {count} processes on this machine, or use cpu.",
        )
    return torch.device("cuda", local_rank)


def choose_precision(precision: Precision, device: torch.device) -> Literal["fp32", "bf16"]:
    """The precision of matrix products; for "auto", the one that is faster on the device."""
    return faster_precision(device)[0] if precision == "auto" else precision


def faster_precision(device: torch.device) -> tuple[Literal["fp32", "bf16"], str]:
    """The precision in which the device multiplies matrices faster, and the reason; on a CPU, a short trial decides."""
    if device.type == "cuda":
        return ("bf16", "the GPU has units for bf16") if supports_bf16(device) else ("fp32", "the GPU has no units for bf16")
    bf16, fp32 = product_seconds(torch.bfloat16), product_seconds(torch.float32)
    comparison = f"{fp32 / bf16:.1f} times faster" if bf16 < fp32 else f"{bf16 / fp32:.1f} times slower"
    return "bf16" if bf16 < _FASTER * fp32 else "fp32", f"products in bf16 are {comparison} than in fp32 here"


def supports_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 without emulating it on a GPU; a CPU always can, if slowly."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def autocast(device: torch.device, bf16: bool) -> AbstractContextManager[None]:
    """A context in which a model computes matrix products in bf16, or, without `bf16`, in the precision of its weights."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def product_seconds(dtype: torch.dtype) -> float:
    """The shortest time of several in which the CPU multiplies two matrices of 512 x 512."""
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: a @ b, number=1, repeat=8))


def choose_compile(choice: str, device: torch.device, parameters: int, tokens: int) -> bool:
    """Whether to use torch.compile; for "auto", whether it saves more time than it takes.

    Args:
        choice: "auto", "on" or "off".
        device: where the model runs.
        parameters: of the model.
        tokens: to train on in the whole run.

    Raises:
        ArgumentError: for "on" without the C++ compiler that torch.compile needs on a CPU.
    """
    missing = compiler_missing(device)
    if choice == "on" and missing:
        raise ArgumentError("compile", f"is on, but {missing}: install g++, or use off.")
    if choice != "auto":
        return choice == "on"
    seconds = 6 * parameters * tokens / _EAGER_FLOPS[device.type]
    return not missing and seconds * _COMPILE_SAVING[device.type] > _COMPILE_SECONDS[device.type]


def compiler_missing(device: torch.device) -> str:
    """What torch.compile lacks on this machine, in words; empty if it lacks nothing."""
    present = device.type != "cpu" or any(map(shutil.which, ("c++", "g++", "clang++")))
    return "" if present else "there is no C++ compiler here"
