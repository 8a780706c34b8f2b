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
from lineartime.cli import main
from lineartime.plots import drawable
from lineartime.runs.curve import draw_comparison, draw_curve
from lineartime.screen import SCREEN, output_console
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
def test_a_training_goes_on_where_messages_cannot_be_written(
    config: Config, stream: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    result = lineartime.train(config(steps=2, out=tmp_path / "日本"))
    assert result.finished
    assert (tmp_path / "日本" / "loss.png").exists()


def test_messages_reach_whatever_standard_error_is_at_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    print("hello", file=SCREEN, flush=True)
    assert capsys.readouterr().err == "hello\n"
    assert not SCREEN.isatty()


def test_rich_does_not_end_the_program_where_the_reader_has_seen_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        output_console().print("text")


@pytest.mark.pictures
@needs_bytes
def test_a_run_in_a_folder_whose_name_is_no_utf8_does_all_that_others_do(
    config: Config, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = tmp_path / NOT_UTF8, tmp_path / f"{NOT_UTF8}.txt"
    data.write_text(text.read_text())
    expected = lineartime.train(config(steps=4)).validation_losses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lineartime.train(config(steps=4, data=str(data), out=run)).validation_losses == expected
    assert (run / "loss.png").exists()
    (run / "step-00000004").rename(run / "aside")  # resume from step 2, which reads the optimiser's part
    assert lineartime.train(out=run, resume=True).validation_losses == expected
    assert lineartime.evaluate(run, max_tokens=50).tokens == 50
    assert main(["runs", str(tmp_path), "--plot", str(tmp_path / "runs.png")]) == 0
    assert "bad" in capsys.readouterr().out
    started = lineartime.train(config(steps=1, init_from=run, out=tmp_path / f"from-{NOT_UTF8}"))
    assert started.finished


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
@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(other, marks=pytest.mark.nightly) for other in ("2>/dev/full", "2>&1 | true"))]
)
def test_a_command_trains_where_its_streams_are_closed_before_the_first_byte(closed: str, text: Path, tmp_path: Path) -> None:
    options = "--override d_model=16 n_blocks=1 d_qk=8 chunk_size=8 --context-length 24 --batch-size 2 --steps 2"
    where = f"--data {text} --cache {tmp_path}/cache --out {tmp_path}/run --eval-windows 2"
    script = f"{sys.executable} -m lineartime train {options} {where} {closed}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert lineartime.load(tmp_path / "run", checkpoint=2)


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
