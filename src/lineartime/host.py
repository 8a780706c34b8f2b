"""The host: its processor, its memory, and the packages installed on it. Nothing here needs PyTorch."""

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

from lineartime.errors import LineartimeError, first_line
from lineartime.fields import Between

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor."""
Threads = Annotated[int, Between(1, 4096)]
"""A number of CPU threads in a process, of which no machine has so many cores."""
SPINS = 5000
"""How often a thread looks whether the others are done before it sleeps: see `benchmarks/STUDIES.md`."""
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux states how much memory the processes of a container may use."""

MAX_HEAP_BLOCK = 32 * 2**20
"""The largest block, in bytes, that glibc takes from its heap; larger blocks are mapped and returned individually."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # options of mallopt(3)
_HUGEPAGE, _COLLAPSE = 14, 25  # options of madvise(2), of which the second is of Linux 6.1
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Where Linux says in brackets to whom it gives pages of 2 MiB: "always madvise [never]"."""
_LARGE_PAGE, _SMALL, _USUAL_PAD = 2 * 2**20, 64 * 2**10, 128 * 2**10


def installed_version(package: str) -> str | None:
    """The version of a Python package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """The user's cache folder, for encoded text and compiled functions. Raises LineartimeError for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineartime"
    except RuntimeError as error:
        raise LineartimeError(f"There is no cache folder ({first_line(error)}): set XDG_CACHE_HOME to a folder.") from None


def threads_in_words(threads: object) -> str:
    """A number of threads: "1 thread", "2 threads"."""
    return f"{threads} thread" if threads == 1 else f"{threads} threads"


def processor_name() -> str:
    """The model name of the CPU if the system reports it, otherwise its architecture."""
    return described("model name") or platform.machine()


def processor_features() -> frozenset[str] | None:
    """The instruction sets of the CPU by Linux's names, such as "avx512_bf16"; None if the system does not report them."""
    listed = described("flags") or described("Features")  # on x86 and on Arm
    return frozenset(listed.split()) if listed else None


def described(name: str) -> str:
    """A property of the first core by its name in Linux, such as "vendor_id"; empty if the system does not report it."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")


def memory_bytes() -> int | None:
    """The bytes of memory that a process may use: the machine's, or the limit of its container; None if unknown."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):  # not on every system
        return None
    for file in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # it is not there, or says "max"
            limits.append(int(file.read_text()))
    return min(limits)


def stop_signals() -> tuple[int, ...]:
    """The signals that ask a program to save its work and stop: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (a closed terminal).

    A program that ignores SIGHUP, as under nohup, continues to ignore it.
    """
    found: list[int] = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        found.append(signal.SIGHUP)
    return tuple(found)


def use_large_pages(memory: Iterable[tuple[int, int]], now: bool = True) -> None:
    """Ask Linux to hold blocks of memory, addresses and bytes, in pages of 2 MiB; small blocks and other systems are left.

    The processor keeps the addresses of a few thousand pages at hand, which are 8 MB in pages of the usual 4 KiB: weights are
    read up to twice as fast, on virtual machines above all. Most distributions give large pages to a program that asks for
    them. With `now`, what the blocks hold moves; otherwise, pages are large that are used for the first time.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    for address, size in memory:
        if library is not None and size >= _SMALL:
            first = address // _LARGE_PAGE * _LARGE_PAGE  # whole pages: what lies beside the block may move, too
            whole = ctypes.c_size_t(-(-(address + size - first) // _LARGE_PAGE) * _LARGE_PAGE)
            library.madvise(ctypes.c_void_p(first), whole, _COLLAPSE if now else _HUGEPAGE)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for later allocations, in large pages, if the C library is glibc; others are left as they are.

    A training step allocates the same hundreds of megabytes as the previous one. glibc returns freed memory at the top of its
    heap to the system, which has to clear it for the next step. That is a tenth of the time of a step of FLASH on 2 cores. At
    the end of the `with` block, free memory is returned.
    """
    library = None
    with suppress(OSError, TypeError):  # TypeError on Windows
        library = ctypes.CDLL(None)
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, MAX_HEAP_BLOCK)
    library.mallopt(_TRIM_THRESHOLD, -1)  # none
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    end = library.sbrk(0)
    # Grow once, by as much as steps may need and an int can say; nothing of it is used yet.
    library.mallopt(_TOP_PAD, min((memory_bytes() or 0) // 4, 2**31 - 1))
    library.free(ctypes.c_void_p(library.malloc(ctypes.c_size_t(MAX_HEAP_BLOCK // 2))))
    library.mallopt(_TOP_PAD, _USUAL_PAD)
    use_large_pages([(end, library.sbrk(0) - end)], now=False)
    try:
        yield
    finally:
        library.mallopt(_TRIM_THRESHOLD, 2 * MAX_HEAP_BLOCK)
        library.malloc_trim(0)


def let_threads_sleep() -> None:
    """Let threads that wait for each other sleep soon, in this process and those that it starts; call it before PyTorch loads.

    PyTorch's threads wait for the slowest at the end of each operation. By default, they spin for milliseconds, and so keep the
    core that the slowest could move to if another program has taken its own. Nothing is changed that the user has set.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
