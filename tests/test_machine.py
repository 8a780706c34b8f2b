"""What the machine has decides what "auto" takes, and nothing else does."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from lineartime import host, machine
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.machine import (
    _WithoutInitialValues,
    choose_compile,
    choose_device,
    choose_precision,
    faster_precision,
    shapes_only,
    using_threads,
    why_not_compile,
)
from lineartime.training.parallel import join_world

CPU, MPS = torch.device("cpu"), torch.device("mps")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """`processor("flags : avx2")`: what the system tells of the processor from now on."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "CPUINFO", file)
    return file.write_text  # type: ignore[return-value]


X86 = "processor\t: 0\nmodel name\t: Fast: CPU\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16\n"
ARM = "Features : asimd bf16 i8mm\n"
INTEL, AMD = "vendor_id\t: GenuineIntel\n", "vendor_id\t: AuthenticAMD\n"
SLOW_UNITS = "without AMX, the processor's units for bf16 (avx512_bf16) are slower than those for fp32"


@pytest.mark.parametrize(
    ("described", "expected", "reason"),
    [
        (X86, "bf16", "the processor has units for bf16 (avx512_bf16)"),
        (ARM, "bf16", "the processor has units for bf16 (bf16)"),
        ("flags : fpu avx512f avx512_vnni\n", "fp32", "the processor has no units for bf16"),
        (INTEL + "flags : avx512_bf16 avx512_fp16\n", "fp32", SLOW_UNITS),
        (INTEL + "flags : avx512_bf16 avx512_fp16 amx_bf16\n", "bf16", "the processor has units for bf16 (avx512_bf16)"),
        (INTEL + "flags : avx512_bf16\n", "bf16", "the processor has units for bf16 (avx512_bf16)"),
        (AMD + "flags : avx512_bf16 avx512_fp16\n", "bf16", "the processor has units for bf16 (avx512_bf16)"),
        ("", "fp32", "the system does not tell whether the processor has units for bf16"),
    ],
)
def test_auto_precision_follows_from_what_the_processor_has(
    described: str, expected: str, reason: str, processor: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(described)
    assert [faster_precision(CPU) for _ in range(3)] == [(expected, reason)] * 3
    assert [choose_precision(asked, CPU) for asked in ("auto", "fp32", "bf16")] == [expected, "fp32", "bf16"]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # units that PyTorch cannot use do not count
    assert choose_precision("auto", CPU) == "fp32"


def test_threads_are_set_for_a_block_alone() -> None:
    before = torch.get_num_threads()
    with using_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with using_threads(None):
        assert torch.get_num_threads() == before
    with pytest.raises(LineartimeError, match=r"^threads is 0, but must be at least 1"), using_threads(0):
        pass


def test_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LineartimeError, match=r"^device is mps, but PyTorch sees no GPU of Apple here: use cpu"):
        choose_device("mps")
    assert choose_device("auto", local_rank=3) == CPU
    assert choose_device("meta") == torch.device("meta")
    assert choose_device(torch.device("cpu", 0)) == torch.device("cpu", 0)
    for device in ("gpu", None):
        with pytest.raises(ArgumentError, match=rf"device is {device}, which PyTorch cannot use here \(.+\): use auto or cpu"):
            choose_device(device)  # type: ignore[arg-type]
    with pytest.raises(LineartimeError, match=r"^device is cuda, but PyTorch sees no GPU here: use cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(LineartimeError, match=r"^device is auto, but process 2 has no GPU: start at most 2 processes"):
        choose_device("auto", local_rank=2)


def test_several_processes_cannot_share_a_gpu_of_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(LineartimeError, match=r"^device is mps, which supports only one process"), join_world(MPS, timeout=1):
        pass


def test_long_runs_are_compiled_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "why_not_compile", lambda device: "")
    assert choose_compile("auto", CPU, 3_000_000, 400 * 4096) == (False, "")
    assert choose_compile("auto", CPU, 3_000_000, 100_000 * 4096) == (True, "")
    assert choose_compile("auto", torch.device("cuda"), 112_000_000, 125_000 * 2**18) == (True, "")
    assert choose_compile("on", CPU, 1, 1) == (True, "")
    assert choose_compile("off", CPU, 10**9, 10**12) == (False, "")


def test_without_a_working_compiler_nothing_is_compiled_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("C++ compile error\nwith its output")))
    for found, reason in ((None, "there is no C++ compiler here"), ("g++", "torch.compile fails here (C++ compile error)")):
        monkeypatch.setattr(machine.shutil, "which", lambda name, found=found: found)
        why_not_compile.cache_clear()
        assert choose_compile("auto", CPU, 3_000_000, 100_000 * 4096) == (False, reason)
        assert choose_compile("on", CPU, 1, 1) == (False, reason)
        assert choose_compile("auto", CPU, 1, 1) == (False, "")  # it would not pay anyway
    why_not_compile.cache_clear()


def test_modules_have_their_shapes_and_no_memory() -> None:
    with shapes_only():
        modules = [nn.Linear(3, 4), nn.Embedding(5, 6), nn.LayerNorm(7)]
        x = torch.zeros(2, 3)
    with _WithoutInitialValues():
        kept = nn.init.normal_(torch.full((2, 3), 3.0))
    assert kept.tolist() == [[3.0] * 3] * 2
    assert [list(module.weight.shape) for module in modules] == [[4, 3], [5, 6], [7]]
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())
    assert x.is_meta
    assert modules[0](x).shape == (2, 4)
