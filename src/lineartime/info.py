"""What would run on this machine, and why: `lineartime info`."""

import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version

import torch
from rich.console import Console
from rich.table import Table

from lineartime.machine import choose_device, compiler_missing, processor_name, product_seconds
from lineartime.ops.backends import choose_backend, why_not_tiled, why_not_triton

EXTRAS = {
    "matplotlib": "plot",
    "tokenizers": "tokenizers",
    "datasets": "data",
    "zstandard": "data",
    "triton": "triton",
    "flash_pytorch": "peers",
    "wandb": "wandb",
    "trackio": "trackio",
}
"""Packages that add something, and the extra that installs each."""


@dataclass(frozen=True)
class InfoConfig:
    """Show what would run on this machine, and why: device, precision, compilation, backends, optional packages."""

    json: bool = False
    """Print the same as one line of JSON."""


def show_info(config: InfoConfig) -> None:
    """Print what `describe_machine` finds."""
    facts = list(describe_machine())
    if config.json:
        print(json.dumps({fact.name: {"value": fact.value, "why": fact.why} for fact in facts}))
        return
    table = Table("", "here", "why", show_edge=False)
    for fact in facts:
        table.add_row(fact.name, fact.value, fact.why)
    # Cells are rendered with the console's settings: without markup, [plot] is the name of an extra and no style.
    Console(highlight=False, markup=False).print(table)


@dataclass(frozen=True)
class Fact:
    """What is chosen here, and the reason."""

    name: str
    value: str
    why: str = ""


def describe_machine() -> Iterator[Fact]:
    """Everything that "auto" decides on this machine. Takes about a second: precisions are tried out."""
    yield Fact("lineartime", version("lineartime"), f"torch {torch.__version__}, Python {platform.python_version()}")
    device = choose_device("auto")
    if device.type == "cuda":
        yield Fact("device", "cuda", torch.cuda.get_device_name())
    else:
        threads = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores"
        yield Fact(
            "device", "cpu", f"PyTorch sees no GPU; {processor_name()}, {threads}, {torch.backends.cpu.get_cpu_capability()}"
        )
    yield _precision(device)
    missing = compiler_missing(device)
    yield Fact("torch.compile", "no", missing) if missing else Fact("torch.compile", "yes", "used where a run is long enough")
    yield from _backends(device)
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            yield Fact(package, "not installed", f"pip install 'lineartime[{extra}]'")
        else:
            yield Fact(package, "installed")


def _precision(device: torch.device) -> Fact:
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        return Fact("precision", "bf16" if supported else "fp32", f"the GPU has {'' if supported else 'no '}units for bf16")
    bf16, fp32 = (product_seconds(dtype) for dtype in (torch.bfloat16, torch.float32))
    faster, factor = ("faster", fp32 / bf16) if bf16 < fp32 else ("slower", bf16 / fp32)
    return Fact("precision", "bf16" if bf16 < 0.8 * fp32 else "fp32", f"products in bf16 are {factor:.1f} times {faster} here")


def _backends(device: torch.device) -> Iterator[Fact]:
    like = torch.empty(0, device=device)
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        chosen = choose_backend("auto", ("torch", "tiled", "triton"), like, dtype, "relu2")
        others = {"triton": why_not_triton(device, dtype, "relu2"), "tiled": why_not_tiled(device, dtype, "relu2")}
        why = "; ".join(f"not {name}: {reason}" for name, reason in others.items() if reason and name != chosen)
        yield Fact(f"attention, {label}", chosen, why)
