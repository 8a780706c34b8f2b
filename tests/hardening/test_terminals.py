"""Terminals, pipes, locales and names of files that are not as usual: nothing of that ends a training or an evaluation."""

import errno
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lineartime
from lineartime.plots import drawable
from lineartime.runs.curve import draw_comparison, draw_curve
from lineartime.training.config import TrainConfig

NOT_UTF8 = os.fsdecode(b"bad\xff$x$")
Config = Callable[..., TrainConfig]
needs_bytes = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no names of files that are no text")


class Broken(io.StringIO):
    """A stream that fails as the system says."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def write(self, text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.pictures
@pytest.mark.parametrize(
    "stream",
    [Broken(errno.EPIPE), None, io.TextIOWrapper(io.BytesIO(), "ascii", "strict")],
    ids=["broken pipe", "closed", "ASCII"],
)
def test_training_goes_on_where_messages_cannot_be_written(
    config: Config, stream: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    result = lineartime.train(config(steps=2, out=tmp_path / "日本"))
    assert result.finished
    assert (tmp_path / "日本" / "loss.png").exists()


def test_titles_are_text_and_no_formulas(tmp_path: Path) -> None:
    assert drawable("a$b$c") == r"a\$b\$c"
    assert drawable("a\udcffb\x07") == "a\ufffdb\ufffd"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for title in ("$\\frac{$", "日本 🚀", "\udcff", "_a", "$", "\\$x$"):
            run = tmp_path / title
            run.mkdir()
            (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "validation_loss": 2.0}\n')
            assert draw_curve(run).exists()
            lines = {f"{title}{number}": [{"step": 1, "tokens": 1, "seconds": 1, "loss": 2.0}] for number in (1, 2)}
            assert draw_comparison({title: lines}, tmp_path / "runs.png").exists()


@pytest.mark.slow
def test_output_that_cannot_be_written_is_a_sentence_and_characters_are_no_error() -> None:
    def run(script: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        settings = {**os.environ, **environment}
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=settings, timeout=100)

    full = run(f"{sys.executable} -m lineartime --version > /dev/full")
    sentence = "error: Cannot write the output or a file: No space left on device; free some space, then try again.\n"
    assert (full.returncode, full.stderr) == (1, sentence)
    script = "from lineartime.screen import open_standard_streams as o; o(); print('\\u65e5 \\udcff')"
    assert run(f'{sys.executable} -c "{script}"', PYTHONIOENCODING="ascii").stdout == "\\u65e5 \\udcff\n"
