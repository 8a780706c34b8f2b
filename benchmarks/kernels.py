"""Compile the Triton kernels without a GPU, and report the resources that they use: `python benchmarks/kernels.py`.

Layers run forward and backward on CPU tensors at the sizes of -base, while kernel launches are recorded instead of executed.
Each launched kernel is compiled for compute capability 9.0 (H100, H200) and 8.0 (A100); `--gpus 89` compiles for 8.9 (RTX 40,
L4, L40). Needs Triton, but no GPU.

Results go to kernels.json and kernels.md in --out. Kernels that kernels.json already has from the same source are not compiled
again, so a run with `--seconds` continues the previous one.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default of Triton 3.9, which warns that it will change
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lineartime.layers import GAU, set_backend
from lineartime.ops.cross_entropy import linear_cross_entropy

SHARED = {90: 232448, 80: 166912, 89: 101376}
"""Bytes of shared memory that a block can use, by compute capability."""
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_E", "BLOCK")
REGISTERS = 65536
"""Registers of a multiprocessor."""


# 1. What the library launches -----------------------------------------------------------------------------------------


class Absent:
    """A stand-in for a GPU, which answers what Triton asks before a launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Launch:
    """A recorded kernel launch for one GPU."""

    case: str
    function: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    capability: int

    @property
    def kernel(self) -> str:
        """The name of the kernel, without `_kernel`."""
        return str(self.function.__name__).removesuffix("_kernel")

    @property
    def variant(self) -> str:
        """The flags that are set."""
        return " ".join(name.removeprefix("HAS_").lower() for name, value in self.constants.items() if value is True) or "plain"

    @property
    def source(self) -> str:
        """The digest that `Row.source` holds for the same kernel."""
        arguments = [described(x) for x in self.arguments]
        constants = {name: str(value) for name, value in self.constants.items()}
        parts = (triton.__version__, self.function.cache_key, arguments, constants, self.capability)
        return hashlib.sha256(str(parts).encode()).hexdigest()[:12]

    def compile(self) -> "Row":
        """Compile the kernel, or return why it failed. Call it in a separate process: it changes global settings of Triton."""
        warps = self.constants["num_warps"]
        sizes = " x ".join(str(self.constants[name]) for name in BLOCKS if name in self.constants)
        name = f"{sizes}, {warps} warps, {self.constants['num_stages']} stages"
        row = Row(self.case, self.kernel, self.variant, name, self.capability, self.source)
        log, start = StringIO(), time.perf_counter()
        triton.runtime.driver.set_active(Absent(self.capability))
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        try:
            with tempfile.TemporaryDirectory() as folder, redirect_stdout(log):
                triton.knobs.cache.dir = folder
                compiled = self.function.warmup(*self.arguments, grid=(1,), **self.constants)
        except Exception as error:
            return Row(**{**asdict(row), "error": f"{type(error).__name__}: {error}"[:300]})
        registers = int(searched(r"Used (\d+) registers", log.getvalue())[0])
        spilled = sum(map(int, searched(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())))
        shared = compiled.metadata.shared
        # Registers are allocated to warps in units of 256; a block takes 1 KB more shared memory than it asks for.
        by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // warps
        by_shared = (SHARED[self.capability] + 1024) // (shared + 1024)
        used = {
            "shared": shared,
            "registers": registers,
            "spilled": spilled,
            "blocks": min(by_registers, by_shared, 64 // warps),
            "products": ", ".join(sorted(set(re.findall(r"(wgmma\.mma_async|mma\.sync)\.", compiled.asm["ptx"])))) or "fma",
            "seconds": round(time.perf_counter() - start, 1),
        }
        return Row(**{**asdict(row), **used})


def gau(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    """Run forward and backward, under autocast unless `dtype` is float32.

    The kernels see widths s = 128 and e = 1536; with 16 features, the dense maps cost almost nothing.
    """
    layer = GAU(16, expansion=96, causal=True, **{"d_qk": 128, **options})
    set_backend(layer, "triton")
    with torch.autocast("cpu", dtype=torch.bfloat16 if dtype == torch.float32 else dtype, enabled=dtype != torch.float32):
        out = layer(torch.randn(*shape, 16))
    out.float().sum().backward()


def loss() -> None:
    """The cross-entropy over a vocabulary of 32,000."""
    hidden, weight = (torch.randn(size, requires_grad=True) for size in ((1, 64, 16), (32000, 16)))
    with torch.autocast("cpu", dtype=torch.bfloat16), patch("lineartime.ops.cross_entropy._can_fuse", return_value=True):
        linear_cross_entropy(hidden, weight, torch.zeros(1, 64, dtype=torch.long)).backward()


CASES: dict[str, Callable[[], None]] = {
    "loss bf16": loss,
    "flash-quad bf16, rotary bias": partial(gau, (2, 2048)),
    "flash-quad bf16, table of biases": partial(gau, (2, 512), max_length=512),
    "flash-quad fp32, rotary bias": partial(gau, (2, 2048), torch.float32),
    "flash-quad fp16, rotary bias": partial(gau, (2, 2048), torch.float16),
    "flash-quad bf16, s = 512": partial(gau, (2, 2048), d_qk=512, relative_bias=False),
}
"""The cases to record, by name, the most important first."""


def recorded(case: str, capability: int) -> list[Launch]:
    """The launches of a case on a GPU of this compute capability."""
    launches: list[Launch] = []
    triton.runtime.driver.set_active(Absent(capability))

    def record(function: Any, *arguments: Any, grid: Any, warmup: bool = False, **constants: Any) -> None:
        launches.append(Launch(case, function, arguments, constants, capability))

    # A layer checks whether its kernels can run, which they cannot on a CPU.
    with patch.object(JITFunction, "run", record), patch("lineartime.ops.backends.why_not", return_value=None):
        CASES[case]()
    return launches


# 2. One compilation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A compiled kernel.

    Attributes:
        case, kernel, variant, config: what was compiled.
        capability: a key of `SHARED`.
        shared: bytes of shared memory per block.
        registers: registers per thread.
        spilled: bytes of register spills, stores and loads, as ptxas reports them.
        blocks: how many blocks fit on a multiprocessor.
        products: the instructions that multiply matrices.
        seconds: the duration of the compilation.
        error: why the compilation failed.
        source: a digest of the kernel's source, its arguments and the version of Triton.
    """

    case: str
    kernel: str
    variant: str
    config: str
    capability: int
    source: str
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    blocks: int = 0
    products: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether a GPU could run it."""
        return not self.error and self.shared <= SHARED[self.capability] and self.blocks > 0


def described(x: Any) -> str:
    """What Triton specialises a kernel for: dtype and alignment of a tensor; whether an integer is 1 or a multiple of 16."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {x.data_ptr() % 16 == 0}"
    return f"{x == 1} {x % 16 == 0}" if isinstance(x, int) else type(x).__name__


def searched(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"ptxas says nothing of the form {pattern!r}: {text[-300:]!r}.")
    return found.groups()


# 3. All of them -------------------------------------------------------------------------------------------------------


def jobs_of(cases: Sequence[str], capabilities: Sequence[int]) -> Iterator[Launch]:
    """The kernels to compile, each one once."""
    seen = set()
    for case in cases:
        for capability in capabilities:
            for launch in recorded(case, capability):
                if launch.source not in seen:
                    seen.add(launch.source)
                    yield launch


_jobs: list[Launch] = []  # forked processes inherit it


def _compile(index: int) -> Row:
    return _jobs[index].compile()


def compile_all(jobs: Sequence[Launch], seconds: float, processes: int, done: Callable[[Row], None]) -> int:
    """Compile in parallel, in order, until the time is up; return how many were not compiled."""
    _jobs[:] = jobs
    started, start = 0, time.perf_counter()
    running: set[Future[Row]] = set()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        while running or (started < len(jobs) and time.perf_counter() - start < seconds):
            while len(running) < processes and started < len(jobs) and time.perf_counter() - start < seconds:
                running.add(pool.submit(_compile, started))
                started += 1
            finished, running = wait(running, return_when="FIRST_COMPLETED")
            for future in finished:
                done(future.result())
    return len(jobs) - started


def as_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, below the version of Triton."""
    head = (
        "kernel",
        "variant",
        "configuration",
        "GPU",
        "shared bytes",
        "registers",
        "spilled bytes",
        "blocks",
        "products",
        "error",
    )
    lines = [f"Compiled by Triton {triton.__version__}.", ""]
    lines += ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * 4 + ["---:"] * 4 + ["---"] * 2) + " |"]
    case = ""
    for row in rows:
        if row.case != case:
            case = row.case
            lines.append(f"| **{case}** |" + " |" * (len(head) - 1))
        over = "" if row.fits or row.error else " (too much)"
        cells = (row.kernel, row.variant, row.config, f"sm_{row.capability}", f"{row.shared:,}{over}", row.registers)
        lines.append("| " + " | ".join(map(str, (*cells, f"{row.spilled:,}", row.blocks, row.products, row.error))) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of the cases, as tables name them; all by default")
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=results, help="folder for kernels.json and kernels.md")
    parser.add_argument("--gpus", nargs="+", type=int, choices=list(SHARED), default=[90, 80], help="compute capabilities")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no compilation after so many seconds")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="compilations at a time")
    options = parser.parse_args()
    for case in options.cases:
        if case not in CASES:
            sys.exit(f"{case!r} is not a case: give some of {', '.join(map(repr, CASES))}.")
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "kernels.json"
    known = {row["source"]: Row(**row) for row in json.loads(store.read_text())["rows"]} if store.exists() else {}
    jobs = list(jobs_of(options.cases or list(CASES), options.gpus))

    def done(row: Row) -> None:
        known[row.source] = row
        print(*asdict(row).values(), flush=True)
        rows = [known[job.source] for job in jobs if job.source in known]
        store.write_text(json.dumps({"triton": triton.__version__, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")

    left = compile_all([job for job in jobs if job.source not in known], options.seconds, options.processes, done)
    rows = [known[job.source] for job in jobs if job.source in known]
    unfit, spilling = [row for row in rows if not row.fits], [row for row in rows if row.spilled]
    (options.out / "kernels.md").write_text(as_table(rows))
    print(f"{len(rows)} kernels, {len(unfit)} unfit, {len(spilling)} with spilled registers; no time for {left} more")
    sys.exit(1 if unfit else 0)


if __name__ == "__main__":
    main()
