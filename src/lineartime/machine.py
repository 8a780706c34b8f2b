"""What this machine is faster with: the decisions behind every "auto"."""

import platform
import shutil
import time
from pathlib import Path
from typing import Literal

import torch

from lineartime.errors import LineartimeError

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "fp32", "bf16"]

# What compiling costs and what part of a step it then saves: on a CPU, benchmarks/speed.py measured 3 to 13 seconds, and a
# few percent of a Transformer's step, next to nothing of FLASH's, whose tiles leave little to fuse; for GPUs, where
# it has not been measured yet, a guess.
_COMPILE_SECONDS = {"cpu": 13.0, "cuda": 90.0}
_COMPILE_SAVES = {"cpu": 0.03, "cuda": 0.30}
# Training arithmetic per second that eager steps reach, to foretell how long a run takes.
_EAGER_FLOPS = {"cpu": 1.5e11, "cuda": 1.0e14}


def choose_device(device: Device, local_rank: int = 0) -> torch.device:
    """The device to compute on, of several GPUs the one of this rank; LineartimeError for a GPU that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise LineartimeError("--device is cuda, but PyTorch sees no GPU here: use --device cpu.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise LineartimeError(
            f"Process {local_rank} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; start as many "
            "processes, or use --device cpu."
        )
    return torch.device("cuda", local_rank)


def choose_precision(precision: Precision, device: torch.device) -> Precision:
    """Either "fp32" or "bf16"; for "auto" whichever multiplies matrices faster here."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # Between the two lies a factor of 4 or a loss, so that a short trial decides reliably.
    return "bf16" if product_seconds(torch.bfloat16) < 0.8 * product_seconds(torch.float32) else "fp32"


def product_seconds(dtype: torch.dtype) -> float:
    """How long a processor takes to multiply two matrices of 512 x 512, at best."""
    a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return min(times)


def choose_compile(choice: str, device: torch.device, parameters: int, tokens: int) -> bool:
    """Whether to use torch.compile; for "auto", whether it saves more of the run than it costs.

    Args:
        choice: "auto", "on" or "off".
        device: where the model runs.
        parameters: of the model.
        tokens: to be trained on in the whole run.

    Raises:
        LineartimeError: for "on" without the C++ compiler that it needs on a CPU.
    """
    missing = compiler_missing(device)
    if choice == "on" and missing:
        raise LineartimeError(f"--compile is on, but {missing}: install g++ or use --compile off.")
    if choice != "auto":
        return choice == "on"
    seconds = 6 * parameters * tokens / _EAGER_FLOPS[device.type]
    return not missing and seconds * _COMPILE_SAVES[device.type] > _COMPILE_SECONDS[device.type]


def processor_name() -> str:
    """What the CPU calls itself, where the system tells; otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def compiler_missing(device: torch.device) -> str:
    """What torch.compile lacks on this machine, or nothing."""
    present = device.type != "cpu" or any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    return "" if present else "there is no C++ compiler here"
