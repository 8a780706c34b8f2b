import pytest
import torch

from lineartime import machine
from lineartime.errors import LineartimeError
from lineartime.machine import choose_compile, choose_precision

CPU = torch.device("cpu")


def test_bf16_is_taken_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for bf16, expected in ((1.0, "bf16"), (3.9, "fp32"), (40.0, "fp32")):
        times = {torch.bfloat16: bf16, torch.float32: 4.0}
        monkeypatch.setattr(machine, "product_seconds", times.__getitem__)
        assert choose_precision("auto", CPU) == expected
        assert choose_precision("fp32", CPU) == "fp32"
        assert choose_precision("bf16", CPU) == "bf16"


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
    with pytest.raises(LineartimeError, match="--compile is on, but there is no C\\+\\+ compiler here"):
        choose_compile("on", CPU, 1, 1)
