import pytest
import torch

from lineartime import machine
from lineartime.errors import LineartimeError
from lineartime.machine import choose_compile, choose_device, choose_precision, faster_precision

CPU = torch.device("cpu")


def test_auto_precision_is_bf16_only_where_bf16_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for bf16, expected in ((1.0, "bf16"), (3.9, "fp32"), (40.0, "fp32")):
        times = {torch.bfloat16: bf16, torch.float32: 4.0}
        monkeypatch.setattr(machine, "product_seconds", times.__getitem__)
        assert choose_precision("auto", CPU) == expected
        assert choose_precision("fp32", CPU) == "fp32"
        assert choose_precision("bf16", CPU) == "bf16"


def test_the_reason_for_a_precision_names_the_speed_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "product_seconds", {torch.bfloat16: 8.0, torch.float32: 4.0}.__getitem__)
    assert faster_precision(CPU) == ("fp32", "products in bf16 are 2.0 times slower than in fp32 here")


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", local_rank=3) == CPU
    with pytest.raises(LineartimeError, match=r"^device is cuda, but PyTorch sees no GPU here: use cpu"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", local_rank=1) == torch.device("cuda", 1)
    with pytest.raises(LineartimeError, match=r"^device is auto, but process 2 has no GPU: start at most 2 processes"):
        choose_device("auto", local_rank=2)


def test_long_runs_are_compiled_and_short_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    assert not choose_compile("auto", CPU, 3_000_000, 400 * 4096)
    assert choose_compile("auto", CPU, 3_000_000, 100_000 * 4096)
    assert choose_compile("auto", torch.device("cuda"), 112_000_000, 125_000 * 2**18)
    assert choose_compile("on", CPU, 1, 1)
    assert not choose_compile("off", CPU, 10**9, 10**12)


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert not choose_compile("auto", CPU, 3_000_000, 100_000 * 4096)
    with pytest.raises(LineartimeError, match="compile is on, but there is no C\\+\\+ compiler here"):
        choose_compile("on", CPU, 1, 1)
