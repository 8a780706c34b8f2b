"""Runs as `lineartime runs` finds, summarises, groups and shows them."""

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lineartime.cli import main, runs
from lineartime.errors import LineartimeError
from lineartime.runs.record import RunRecord, lock_run
from lineartime.runs.table import summarize
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Trainer, train


@pytest.fixture(autouse=True)
def without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the plot of each table, where no test looks at it."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr(runs, "draw_comparison", lambda groups, file: file)


def make_run(run: Path, best: float = 2.0, steps: int = 40, taken: int = 40, **options: Any) -> Path:
    """A run's files as training leaves them: its losses fall to `best` at step 30."""
    RunRecord(run).begin({"preset": "flash-tiny", "data": "/texts/books", "steps": steps, "seed": 0, **options}, [])
    lines: list[dict[str, float]] = []
    for step in range(1, taken + 1):
        totals = {"tokens": 1000 * step, "seconds": 0.5 * step}
        lines.append({"step": step, "loss": 5 / step, "tokens_per_second": 2000.0, **totals})
        if step % 10 == 0:
            loss = best + abs(step - 30) / 10
            lines.append({"step": step, "validation_loss": loss, "validation_bits_per_byte": loss / 2, **totals})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def silence(run: Path, seconds: float) -> None:
    """As if a run had last written so long ago."""
    then = time.time() - seconds
    for path in (run / "metrics.jsonl", run):
        os.utime(path, (then, then))


def state_of(run: Path) -> str:
    return summarize(run, "")[0].state


def rows(text: str) -> list[list[str]]:
    """The cells of a printed table, the names of the columns first."""
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith((" ─", "The screen", "plot:"))]


def test_summary_tells_what_training_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", best=2.0)
    with (run / "metrics.jsonl").open("a") as file:  # a step that is three times as fast, and a damaged line
        file.write('{"step": 41, "tokens_per_second": 6000.0}\nrubbish\n')
    summary, problems = summarize(run, "run")
    assert problems == []
    assert (summary.step, summary.tokens, summary.seconds) == (41, 40_000, 20.0)
    assert summary.training_loss == pytest.approx(sum(5 / step for step in range(21, 41)) / 20)
    assert (summary.validation_loss, summary.bits_per_byte) == (2.0, 1.0)
    assert (summary.tokens_per_second, summary.state) == (2000.0, "finished")


def test_state_claims_no_more_than_the_files_tell(tmp_path: Path) -> None:
    run = make_run(tmp_path / "finished")
    assert state_of(run) == "finished"  # a copy without checkpoints
    (run / "step-00000030").mkdir()
    silence(run, 10_000)
    assert state_of(run) == "stopped"  # without its last checkpoint
    (run / "step-00000040").mkdir()
    assert state_of(run) == "finished"
    run = make_run(tmp_path / "run", taken=20)
    assert state_of(run) == "running"
    silence(run, 3600)
    assert state_of(run) == "stopped"
    text = (run / "metrics.jsonl").read_text().replace('"seconds": 10.0', '"seconds": 10000.0')  # 500 seconds a step
    (run / "metrics.jsonl").write_text(text)
    silence(run, 3600)
    assert state_of(run) == "running"
    silence(run, 10_000)
    with lock_run(run):
        assert state_of(run) == "running"
    silence(run, 10_000)
    assert state_of(run) == "stopped"  # its process was killed: the system has released the lock


@pytest.mark.pictures
def test_command_shows_the_best_run_first_with_all_columns_and_options_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "a", best=2.5, learning_rate=0.01, override=(), out="x", track=["wandb"])
    make_run(tmp_path / "deep" / "down" / "b", best=2.25, learning_rate=0.003, override=("d_model=16",), out="y")
    make_run(tmp_path / "c", taken=5, learning_rate=0.01)
    assert main(["runs", str(tmp_path)]) == 0
    header, *table = rows(capsys.readouterr().out)
    names = ["run", "model", "data", "step", "tokens", "training", "validation", "bits/byte", "tokens/s", "time"]
    assert header == [*names, "state", "learning_rate", "d_model"]
    assert table[0] == [
        *("deep/down/b", "flash-tiny", "books", "40/40", "40,000", "0.170"),
        *("2.250", "1.125", "2,000", "20", "s", "finished", "0.003", "16"),
    ]
    assert [row[0] for row in table] == ["deep/down/b", "a", "c"]
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    picture = tmp_path / "new" / "x.png"
    assert main(["runs", str(tmp_path / "a"), "--json", "--plot", str(picture)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["runs"][0]["validation_loss"], facts["runs"][0]["options"]["seed"], facts["plot"]) == (2.5, 0, str(picture))
    assert picture.exists()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["runs", str(tmp_path)]) == 0  # a picture that nobody has asked for
    assert "No plot: A plot needs matplotlib" in capsys.readouterr().err
    with pytest.raises(LineartimeError, match=r"pip install 'lineartime\[plot\]'"):
        runs.run(runs.RunsOptions((tmp_path,), plot=picture))


def test_runs_are_ranked_beside_those_with_their_text_tokenizer_and_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", best=3.0)
    make_run(tmp_path / "b", best=2.0)
    make_run(tmp_path / "c", best=1.0, tokenizer="bpe-8000")
    make_run(tmp_path / "d", best=0.5, task="mlm")
    make_run(tmp_path / "e", best=0.2, data=["/other/books", "hub:org/news"])
    assert main(["runs", str(tmp_path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = [line.split("  ")[0] for line in lines if line.startswith(("text", "a ", "b ", "c ", "d ", "e "))]
    assert found == [
        *("text books news, tokenizer bytes, task clm", "e"),
        *("text books, tokenizer bpe-8000, task clm", "c"),
        *("text books, tokenizer bytes, task clm", "b", "a"),
        *("text books, tokenizer bytes, task mlm", "d"),
    ]


def test_run_that_an_error_ended_says_so_until_it_is_resumed(
    config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config().run_directory
    message = "The validation loss became nan at step 2: start another run in another folder, with `learning_rate` below 0.003"
    with monkeypatch.context() as patch:
        values = iter([5.0, math.nan])
        patch.setattr(Trainer, "validation_loss", lambda self, stop: next(values))
        with pytest.raises(LineartimeError, match=message):
            train(config(steps=2))
    capsys.readouterr()
    assert main(["runs", str(run)]) == 0
    shown = capsys.readouterr().out
    assert rows(shown)[1][-1] == "failed"  # and not finished, though it has taken all of its steps
    assert f"{run} failed: {message}" in shown
    with pytest.raises(LineartimeError, match="already holds a run: resume it"):
        train(config(steps=2))
    assert state_of(run) == "failed"  # what was refused has not touched it
    train(config(steps=2, resume=True))
    assert (state_of(run), summarize(run, "")[0].error) == ("finished", None)


def test_damaged_files_are_named_and_the_other_runs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "whole")
    make_run(tmp_path / "one", best=2.5)
    (tmp_path / "one" / "run.json").write_text("{")
    assert main(["runs", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    found = [row[0] for row in rows(captured.out)]
    assert found == ["text", "run", "whole", "unknown", "run", "one"]  # two groups with titles and headers
    assert captured.err.startswith(f"{tmp_path}/one/run.json is damaged (it is not JSON: ")
