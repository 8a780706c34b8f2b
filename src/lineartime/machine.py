"""Device, precision and compilation: what suits this machine, which is what "auto" chooses; and modules without values."""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lineartime.choices import Precision
from lineartime.errors import ArgumentError, first_line
from lineartime.host import described, processor_features
from lineartime.host import memory_bytes as host_memory

_WORTH_COMPILING = {"cpu": 1.5e11 / 6 * 13.0 / 0.03, "cuda": 1.0e14 / 6 * 90.0 / 0.30}
"""Parameters times tokens of a run from which torch.compile saves more time than it takes.

On a CPU, it takes 13 s and saves 3 % of a step of Transformer++ (FLASH gains less), which computes 1.5e11 operations a second,
as measured; on a GPU, these are estimates.
"""
_BF16_FEATURES = ("avx512_bf16", "bf16")
"""Linux's names for the bf16 units of a CPU: on x86 (CPUs with AMX also have them) and on Arm."""


def choose_device(device: "str | torch.device", local_rank: int = 0) -> torch.device:
    """The device to compute on: "auto" takes CUDA, then MPS, then the CPU; other names are PyTorch's, such as "cuda:1".

    Of several GPUs, "auto" and "cuda" give each process its own.

    Raises:
        ArgumentError: if PyTorch sees no such device, or none for this process.
    """
    if device == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError("device", "is mps, but PyTorch sees no GPU of Apple here: use cpu.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("device", "is cuda, but PyTorch sees no GPU here: use cpu.")
    if device in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count:
            found = f"is {device}, but process {local_rank} has no GPU"
            raise ArgumentError("device", f"{found}: start at most {count} processes on this machine, or use cpu.")
        return torch.device("cuda", local_rank)
    if device == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        found_device = torch.device(device)
        torch.empty(0, device=found_device)
    except (RuntimeError, AssertionError, TypeError) as error:  # AssertionError: a build without CUDA
        what = f"is {device}, which PyTorch cannot use here ({first_line(error)}): use auto or cpu."
        raise ArgumentError("device", what) from None
    return found_device


def choose_precision(precision: Precision, device: torch.device) -> Literal["fp32", "bf16"]:
    """The precision of matrix products; for "auto", the one that is faster on the device."""
    return faster_precision(device)[0] if precision == "auto" else precision


def faster_precision(device: torch.device) -> tuple[Literal["fp32", "bf16"], str]:
    """The precision in which the device multiplies matrices faster, and the reason.

    The choice depends only on the device's features. A measurement would depend on what else is running.
    """
    if device.type == "cuda":
        return ("bf16", "the GPU has units for bf16") if supports_bf16(device) else ("fp32", "the GPU has no units for bf16")
    if device.type != "cpu":
        return "fp32", f"bf16 has not been measured on {device.type}"
    features = processor_features()
    if features is None:
        return "fp32", "the system does not tell whether the processor has units for bf16"
    units = next((feature for feature in _BF16_FEATURES if feature in features), None)
    if units is None:
        return "fp32", "the processor has no units for bf16"
    if not torch.backends.mkldnn.is_available():
        return "fp32", f"the processor has units for bf16 ({units}), but PyTorch was built without oneDNN, which uses them"
    # Since AMX (Sapphire Rapids), Intel's AVX-512 multiplies bf16 at half the speed of fp32; virtual machines often hide AMX.
    # AMD's multiplies it faster. Cooper Lake, which came before AMX, has not been measured.
    needs_amx = described("vendor_id") == "GenuineIntel" and {"avx512_bf16", "avx512_fp16"} <= features
    if needs_amx and "amx_bf16" not in features:
        return "fp32", f"without AMX, the processor's units for bf16 ({units}) are slower than those for fp32"
    return "bf16", f"the processor has units for bf16 ({units})"


def supports_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16, on a GPU without emulation; a CPU always can, if slowly."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@contextmanager
def autocast(device: torch.device, bf16: bool) -> Iterator[None]:
    """A context in which a model computes matrix products in bf16 or, without `bf16`, in the precision of its weights.

    PyTorch keeps its copies of weights until the outermost context ends, enabled or not: the caller's, many steps later.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
            yield
    finally:
        torch.clear_autocast_cache()


def memory_bytes(device: torch.device) -> int | None:
    """The total memory of a device in bytes, including memory in use; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Use this many CPU threads in a `with` block; None is PyTorch's default. Raises ArgumentError for a number below 1."""
    if threads is None:
        yield
        return
    if threads < 1:
        raise ArgumentError("threads", f"is {threads}, but must be at least 1.")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_compile(choice: str, device: torch.device, parameters: int, tokens: int) -> tuple[bool, str]:
    """Whether to use torch.compile: "on", "off" or, for "auto", if it saves more time than it takes in a run of so many tokens.

    It is not used if it fails. Returns also why it is not used, although it was asked for or would save time; otherwise empty.
    """
    pays = device.type in _WORTH_COMPILING and parameters * tokens > _WORTH_COMPILING[device.type]
    wanted = choice == "on" or (choice == "auto" and pays)
    why_not = why_not_compile(device) if wanted else ""
    return wanted and not why_not, why_not


@cache
def why_not_compile(device: torch.device) -> str:
    """Why torch.compile cannot be used on a device; empty if it can. The first call takes seconds to compile a function."""
    if missing := compiler_missing(device):
        return missing
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own warnings, which do not help a user
            torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as error:  # whatever the compiler raises: the code runs without it
        return f"torch.compile fails here ({first_line(error)})"
    return ""


def compiler_missing(device: torch.device) -> str:
    """What torch.compile lacks on this machine, in words; empty if it lacks nothing."""
    present = device.type != "cpu" or any(map(shutil.which, ("c++", "g++", "clang++")))
    return "" if present else "there is no C++ compiler here"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    words = ("allocate memory", "out of memory", "cuda_error_out_of_memory")
    told = isinstance(error, RuntimeError) and any(each in str(error).lower() for each in words)
    return told or isinstance(error, (MemoryError, torch.OutOfMemoryError))


class _WithoutInitialValues(TorchFunctionMode):
    """Leave tensors as they are that torch.nn.init would fill, where PyTorch asks: with random numbers or a constant."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make tensors on the meta device: they have a shape and a dtype, but no memory.

    With `torch.device("meta")` alone, PyTorch imports its compiler to draw the first initial value, which takes seconds.
    """
    with torch.device("meta"), _WithoutInitialValues():
        yield
