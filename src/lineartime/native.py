"""C++ functions for CPUs: built at first use if there is a compiler, and cached on disk.

LINEARTIME_NATIVE=0 turns them off.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.host import cache_folder, processor_features

SWITCH = "LINEARTIME_NATIVE"
"""The environment variable that turns native functions off."""
NATIVE_DTYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}
"""The dtypes for which a library can be built, and what C++ calls them."""
_HEADER = Path(__file__).with_name("numbers.h")
_SILENT_SECONDS, _BUILD_SECONDS = 5.0, 120.0
_BUILDS: list["subprocess.Popen[bytes]"] = []
"""Those that go on: without a reference, Python warns of a process that is not waited for."""
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
"""OpenMP, for functions that take turns with PyTorch's products. Threads of our own would compete with PyTorch's, which spin
after each product: training would take up to 1.2 times as long."""
_UNITS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
"""Compiler options by the CPU capability that PyTorch reports. Not -march=native: several machines may share a folder."""


def cpp_compiler() -> str | None:
    """The GNU C++ compiler of this machine, or None. Code built by clang needs another OpenMP library than PyTorch's."""
    return shutil.which("g++")


def openmp_library() -> Path | None:
    """PyTorch's own OpenMP library. A second one would start as many threads again, and they would compete."""
    libraries = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return libraries[0] if libraries else None


def why_not_native() -> str | None:
    """Why C++ functions cannot be built on this machine, as the end of a sentence; None if they can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if platform.system() != "Linux":
        return f"they are built on Linux, not on {platform.system()}"
    if openmp_library() is None:
        return "this PyTorch does not bring its OpenMP library, libgomp"
    return None if cpp_compiler() else "there is no GNU C++ compiler here"


_AT_IMPORT = why_not_native()
"""What compiled code takes for the reason, for PyTorch cannot trace the search for a compiler."""


def why_not_built(source: Path, dtype: torch.dtype) -> str | None:
    """Why the functions of a source file cannot be called, as the end of a sentence; None if they can. It builds them."""
    if torch.compiler.is_compiling():
        return _AT_IMPORT
    if native_functions(source, dtype) is not None:
        return None
    return why_not_native() or f"its functions in C++ cannot be built from {source.name}"


class NativeFunctions:
    """The functions of a library, which is built for tensors of one dtype."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._by_name: dict[str, Any] = {}

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Call a function. Tensors are passed as pointers, int as int64, float as double, and None as a null pointer.

        Tensors must be contiguous. The number of threads that PyTorch uses is passed as the last argument.
        """
        function = self._by_name.get(name)
        if function is None:
            types = [
                ctypes.c_double if isinstance(x, float) else ctypes.c_int64 if isinstance(x, int) else ctypes.c_void_p
                for x in arguments
            ]
            function = self._by_name[name] = self.function(name, *types, ctypes.c_int64)
        function(*[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments], torch.get_num_threads())

    def function(self, name: str, *types: type) -> Any:
        """A function that takes these types of ctypes and returns int64, for many calls: `call` looks at every argument."""
        function = self._library[name]  # an item is a new object at each access
        function.restype, function.argtypes = ctypes.c_int64, types
        return function


@cache
def native_functions(source: Path, dtype: torch.dtype, *definitions: str) -> NativeFunctions | None:
    """The functions of a source file for a dtype; None if they cannot be built. The first process here builds them in seconds.

    Definitions, as in "WEIGHT=int8_t", are those of macros.

    Warns:
        RuntimeWarning: if the compiler fails, with the first line of its output.
    """
    compiler, openmp = cpp_compiler(), openmp_library()
    if why_not_native() is not None or compiler is None or openmp is None:
        return None
    try:
        return NativeFunctions(_library(source, (f"NUMBER={NATIVE_DTYPES[dtype]}", *definitions), compiler, openmp))
    except (OSError, LineartimeError, subprocess.SubprocessError) as error:  # LineartimeError: a user without a home
        output = (getattr(error, "stderr", None) or str(error)).strip() or type(error).__name__
        warnings.warn(
            f"{source.name} cannot be used, so plain PyTorch takes its place, which is slower: {output.splitlines()[0]} "
            f"({SWITCH}=0 turns this message off)",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _library(source: Path, definitions: tuple[str, ...], compiler: str, openmp: Path) -> ctypes.CDLL:
    """Open the library of a source file, or build it for the instruction sets of this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    options = [*_OPTIONS, *(f"-D{each}" for each in definitions), "-include", str(_HEADER), *_UNITS.get(capability, ())]
    if capability == "AVX512" and "avx512_bf16" in (processor_features() or ()):  # which PyTorch does not report
        options.append("-mavx512bf16")
    # The name differs if the source, a header or an option does.
    texts = [file.read_bytes() for file in (source, *sorted(_HEADER.parent.rglob("*.h")))]
    facts = [option.encode() for option in (*options, compiler, openmp.name, platform.machine())]
    number = "-".join(each.split("=")[1] for each in definitions)
    name = f"{source.stem}-{number}-{hashlib.sha256(b'|'.join(texts + facts)).hexdigest()[:16]}.so"
    library = cache_folder() / "native" / name
    with suppress(OSError):  # it is missing or damaged
        if _is_own(library.parent):
            return ctypes.CDLL(str(library))
    return _built([compiler, *options], source, openmp, library)


def _is_own(folder: Path) -> bool:
    """Whether only this user or root can write to a folder."""
    facts = folder.stat()
    return facts.st_uid in (0, os.getuid()) and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _built(command: list[str], source: Path, openmp: Path, library: Path) -> ctypes.CDLL:
    """Compile a library, move it to its place atomically, so that other processes see all of it or nothing, and open it."""
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_own(library.parent):
        raise OSError(f"{library.parent} belongs to someone else, or others can write to it")
    folder = Path(tempfile.mkdtemp(dir=library.parent))
    made, objects = folder / library.name, folder / "objects.o"
    # -fopenmp would link the system's own OpenMP library
    steps = (
        [*command, "-c", source, "-o", objects],
        [command[0], "-shared", objects, openmp, "-o", made],
        ["mv", "-f", made, library],
    )
    script = (
        " && ".join(shlex.join(map(str, step)) for step in steps)
        + f"; status=$?; rm -rf {shlex.quote(str(folder))}; exit $status"
    )
    with tempfile.TemporaryFile("w+") as errors:
        # A session of its own: what is built too late, or when the user has lost patience, is kept for the next process.
        build = subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            build.wait(_SILENT_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"building functions in C++ from {source.name}, once on this machine ...", file=sys.stderr, flush=True)
        with suppress(subprocess.TimeoutExpired):
            build.wait(_BUILD_SECONDS)
        if build.returncode is None:
            _BUILDS.append(build)
            raise OSError(f"its build has taken {_BUILD_SECONDS:.0f} s, and goes on for the processes after this one")
        errors.seek(0)
        if build.returncode:
            raise subprocess.CalledProcessError(build.returncode, command, stderr=errors.read())
    return ctypes.CDLL(str(library))
