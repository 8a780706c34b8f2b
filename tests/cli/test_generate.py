"""`lineartime generate`."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lineartime.cli import main

Start = Callable[..., "subprocess.Popen[str]"]


def test_generate_continues_the_prompt_and_repeats_itself_with_a_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(folder / "run"), "--prompt", "the square", "--max-tokens", "30", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert all(text.startswith("the square") for text in shown)
    assert shown[0] == shown[1] != shown[2]


def test_the_text_is_alone_on_standard_output_and_the_precision_is_told_on_standard_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(folder / "run"), "--prompt", "the", "--max-tokens", "5", "--temperature", "0"]
    for precision in ("fp32", "bf16"):
        assert main([*arguments, "--precision", precision]) == 0
        shown = capsys.readouterr()
        assert (shown.out.startswith("the"), "cpu" in shown.out) == (True, False)
        assert re.fullmatch(rf".*/step-\d+: cpu, {precision}\n", shown.err)


def test_generation_computes_in_the_precision_and_with_the_threads_that_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = torch.get_num_threads(), []
    multiply = torch.nn.functional.linear

    def linear(*arguments: torch.Tensor) -> torch.Tensor:
        out = multiply(*arguments)
        seen.append((out.dtype, torch.get_num_threads()))
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        asked = ["--max-tokens", "3", "--precision", precision, "--threads", str(before + 1)]
        assert main(["generate", str(folder / "run"), *asked]) == 0
        assert set(seen) == {(dtype, before + 1)}
        seen.clear()
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_text_appears_as_it_is_produced(folder: Path, start: Start) -> None:
    for seed in range(10):  # a text may end its document before it can be interrupted, which is no fault
        process = start("generate", str(folder / "run"), "--max-tokens", "1000000", "--seed", str(seed))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), True)
        assert os.read(process.stdout.fileno(), 1)  # long before the millionth token
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
        if process.returncode != 0:
            break
    assert process.returncode == 130
    assert "Traceback" not in shown
