"""What "auto" chooses on this machine, and why."""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import lineartime
from lineartime.errors import LineartimeError, first_line, is_installed
from lineartime.host import LARGE_PAGES, cache_folder, processor_name, threads_in_words
from lineartime.machine import choose_device, compiler_missing, faster_precision
from lineartime.native import why_not_native
from lineartime.ops.backends import Backend, choose_backend, why_not
from lineartime.units import size

EXTRAS = {
    "matplotlib": "plot",
    "tokenizers": "tokenizers",
    "datasets": "data",
    "zstandard": "data",
    "triton": "triton",
    "transformers": "hf",
    "onnxscript": "onnx",
    "wandb": "wandb",
}
"""Optional packages, and the extra that installs each."""


@dataclass(frozen=True)
class Fact:
    """A choice on this machine, and the reason for it."""

    name: str
    value: str
    why: str = ""


def explain_machine() -> Iterator[Fact]:
    """Everything that "auto" decides on this machine."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    yield Fact("lineartime", lineartime.__version__, f"{versions}, in {Path(lineartime.__file__).parent}")
    device = choose_device("auto")
    if device.type == "cuda":
        yield Fact("device", "cuda", torch.cuda.get_device_name())
    elif device.type == "mps":
        yield Fact("device", "mps", f"the GPU of {processor_name()}")
    else:
        threads = f"{threads_in_words(torch.get_num_threads())} on {os.cpu_count()} cores"
        cpu = f"{processor_name()}, {threads}, {torch.backends.cpu.get_cpu_capability()}"
        yield Fact("device", "cpu", f"PyTorch sees no GPU; {cpu}")
    yield Fact("precision", *faster_precision(device))
    missing, reason = compiler_missing(device), why_not_native()
    yield Fact("torch.compile", "no" if missing else "yes", missing or "used if a run is long enough")
    built = "built at first use, for tiles, steps and small products"
    yield Fact("C++ functions", "no" if reason else "yes", reason or built)
    with suppress(OSError):  # on Linux alone
        given = "[never]" not in LARGE_PAGES.read_text()
        why = "weights and the memory of steps lie in pages of 2 MiB" if given else f"{LARGE_PAGES} is never, not madvise"
        yield Fact("large pages", "yes" if given else "no", why)
    like = torch.empty(0, device=device)
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        chosen = choose_backend("auto", ("torch", "tiled", "triton"), like, dtype, "relu2")
        others: dict[Backend, str | None] = {name: why_not(name, device, dtype, "relu2") for name in ("triton", "tiled")}
        why = "; ".join(f"not {name}: {reason}" for name, reason in others.items() if reason and name != chosen)
        yield Fact(f"attention, {label}", chosen, "of GAU; FLASH takes torch" if chosen == "triton" else why)
    try:
        folder = cache_folder()
        files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        yield Fact("cache", size(sum(files)), f"encoded texts and compiled functions in {folder}, which may be deleted")
    except (LineartimeError, OSError) as error:  # without a home, or with a folder that may not be read
        yield Fact("cache", "unknown", first_line(error))
    for package, extra in EXTRAS.items():
        found = is_installed(package)
        yield Fact(package, "installed" if found else "not installed", "" if found else f"pip install 'lineartime[{extra}]'")
