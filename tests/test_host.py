"""The host: what is kept of its memory."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lineartime.native import why_not_native

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import ctypes, resource
from contextlib import nullcontext
from lineartime.host import freed_memory_kept

BLOCKS, SIZE = 12, 16 * 2**20
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
library.free.argtypes = (ctypes.c_void_p,)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    blocks = [library.malloc(SIZE) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in reversed(blocks):
        library.free(block)

def faults_of_a_step():
    step()
    step()
    before = faults()
    step()
    return faults() - before

with freed_memory_kept():
    inside = faults_of_a_step()
held = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
print(inside, faults_of_a_step(), held)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of GNU can be told to keep memory")
def test_freed_memory_is_kept_for_the_next_step_and_returned_at_the_end() -> None:
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        pytest.skip("the C library is not GNU's")
    if HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text():
        pytest.skip("the system gives this memory in pages of 2 MiB, so there are few faults to count")
    import resource  # missing on Windows

    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    inside, outside, held = map(int, ran.stdout.split())
    pages = 12 * 16 * 2**20 // resource.getpagesize()
    assert inside < pages // 100
    assert outside > pages // 2
    assert held < 12 * 16 * 2**20


def test_command_line_says_how_threads_wait_before_pytorch_is_loaded() -> None:
    script = """
import os, sys
from lineartime import __main__ as program
import lineartime.cli
assert "torch" not in sys.modules
lineartime.cli.main = lambda: print(os.environ["GOMP_SPINCOUNT"], "torch" in sys.modules) or 0
program.main()
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["5000", "False"]


@pytest.mark.skipif(why_not_native() is not None, reason=f"functions in C++ cannot be built: {why_not_native()}")
def test_threads_are_those_of_pytorch() -> None:
    """A second library of threads would start as many threads again."""
    script = """
import torch
from lineartime import FLASH
torch.set_num_threads(3)
layer = FLASH(16, d_qk=8, chunk_size=8)
layer(torch.randn(2, 32, 16)).sum().backward()
print(len({line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line or "iomp" in line}))
print(sum("tiles-" in line for line in open("/proc/self/maps")) > 0)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "True"]
