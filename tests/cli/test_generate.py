"""`lineartime generate`."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Start = Callable[..., "subprocess.Popen[str]"]


def test_generate_continues_the_prompt_and_repeats_itself_with_a_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(folder / "run"), "--prompt", "the square", "--max-tokens", "30", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert all(text.startswith("the square") for text in shown)
    assert shown[0] == shown[1] != shown[2]


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
