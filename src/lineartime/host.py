"""The host: its processor and the packages installed on it. Nothing here needs PyTorch."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the processor."""


def installed_version(package: str) -> str | None:
    """The version of a Python package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor_name() -> str:
    """The model name of the CPU where the system tells it, otherwise its architecture."""
    return _described("model name") or platform.machine()


def processor_features() -> frozenset[str] | None:
    """The instruction sets of the CPU by Linux's names, such as "avx512_bf16"; None where the system does not tell them."""
    listed = _described("flags") or _described("Features")  # on x86 and on Arm
    return frozenset(listed.split()) if listed else None


def _described(name: str) -> str:
    """A property of the first core, or nothing where the system does not tell it."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
