import dataclasses
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import ConsoleDimensions

from lineartime.cli import runs
from lineartime.errors import LineartimeError
from lineartime.runs.lock import LOCK_FILE, lock_run
from lineartime.runs.metrics import read_metrics
from lineartime.runs.record import RunRecord
from lineartime.runs.summary import RunSummary, find_runs, name_runs, summarize
from lineartime.runs.table import group_runs
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Validation, train


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
        lines.append({"step": step, "loss": 5 / step, "tokens_per_second": 2000.0, "waiting": 0.25, **totals})
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


def shown(*folders: Path, **options: Any) -> None:
    runs.run(runs.RunsOptions(folders, **options))


def rows(text: str) -> list[list[str]]:
    """The cells of a printed table, the names of the columns first."""
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith((" ─", "The screen", "plot:"))]


def test_a_summary_tells_what_training_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", best=2.0)
    with (run / "metrics.jsonl").open("a") as file:  # a step that is three times as fast
        file.write('{"step": 41, "skipped": 2, "tokens_per_second": 6000.0, "waiting": 0.01}\n')
    summary, problems = summarize(run, "run")
    assert problems == []
    assert (summary.step, summary.tokens, summary.seconds, summary.skipped) == (41, 40_000, 20.0, 2)
    assert summary.training_loss == pytest.approx(sum(5 / step for step in range(21, 41)) / 20)
    assert (summary.validation_loss, summary.bits_per_byte) == (2.0, 1.0)
    assert (summary.tokens_per_second, summary.state) == (2000.0, "finished")
    assert summary.waiting == pytest.approx((40 * 3 * 0.25 + 0.01) / 121)  # by time


def test_a_run_without_its_last_checkpoint_is_not_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert summarize(run, "run")[0].state == "finished"  # a copy without checkpoints
    (run / "step-00000030").mkdir()
    silence(run, 10_000)
    assert summarize(run, "run")[0].state == "silent"
    (run / "step-00000040").mkdir()
    assert summarize(run, "run")[0].state == "finished"


def test_the_state_claims_no_more_than_the_files_tell(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", taken=20)
    assert summarize(run, "")[0].state == "running"
    silence(run, 3600)
    summary = summarize(run, "")[0]
    assert summary.state == "silent"
    assert summary.silent_seconds == pytest.approx(3600, abs=10)
    text = (run / "metrics.jsonl").read_text().replace('"seconds": 10.0', '"seconds": 10000.0')  # 500 seconds a step
    (run / "metrics.jsonl").write_text(text)
    silence(run, 3600)
    assert summarize(run, "")[0].state == "running"


def test_a_run_whose_process_of_this_machine_was_killed_is_not_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", taken=20)
    with lock_run(run):
        assert summarize(run, "")[0].state == "running"
    assert summarize(run, "")[0].state == "silent"  # the system has released the lock
    (run / LOCK_FILE).write_text("another machine")
    assert summarize(run, "")[0].state == "running"


@pytest.mark.pictures
def test_the_best_run_comes_first_and_all_columns_are_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", best=2.5)
    make_run(tmp_path / "deep" / "down" / "b", best=2.25)
    make_run(tmp_path / "c", taken=5)
    shown(tmp_path)
    header, *table = rows(capsys.readouterr().out)
    names = ["run", "model", "data", "step", "tokens", "training", "validation", "bits/byte", "tokens/s", "time", "waiting"]
    assert header == [*names, "state"]  # nothing was skipped
    assert table[0] == [
        *("deep/down/b", "flash-tiny", "books", "40/40", "40,000", "0.170"),
        *("2.250", "1.125", "2,000", "20", "s", "25.0%", "finished"),
    ]
    assert [row[0] for row in table] == ["deep/down/b", "a", "c"]
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_no_run_is_shown_twice_and_one_with_a_link_to_it_has_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run-2024")
    make_run(tmp_path / "z" / "own")
    (tmp_path / "latest").symlink_to(tmp_path / "run-2024")
    (tmp_path / "loop").symlink_to(tmp_path)
    shown(run, tmp_path, json=True)
    facts = json.loads(capsys.readouterr().out)
    assert sorted(str(Path(found["path"]).relative_to(tmp_path)) for found in facts["runs"]) == ["run-2024", "z/own"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "z" / "own")  # which is found first
    assert sorted(name_runs([tmp_path])[0].values()) == ["run-2024", "z/own"]


def test_folders_are_searched_three_levels_down_and_never_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "1" / "2" / "3")
    make_run(tmp_path / "1" / "2" / "3" / "inside")
    make_run(tmp_path / "one" / "two" / "three" / "four")
    make_run(tmp_path / ".hidden")
    (tmp_path / "lost+found").mkdir()
    listed = Path.iterdir

    def refuse(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return iter(listed(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    unreadable: list[str] = []
    assert list(find_runs(tmp_path, unreadable)) == [tmp_path / "1" / "2" / "3"]
    [sentence] = unreadable
    assert f"Cannot read {tmp_path / 'lost+found'}" in sentence


def test_a_run_from_before_there_were_records_is_told_by_its_checkpoint(finished: Path) -> None:
    (finished / "run.json").unlink()
    summary, problems = summarize(finished, "run")
    assert problems == []
    assert (summary.options["preset"], summary.step, summary.tokens, summary.state) == ("flash-tiny", 6, 288, "finished")
    assert summary.validation_loss == min(line.get("validation_loss", 9.0) for line in read_metrics(finished))


@pytest.mark.pictures
def test_a_plot_and_json_are_made_as_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "a", seed=3)
    shown(tmp_path, json=True)
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 1
    facts = json.loads(text)
    [run] = facts["runs"]
    assert (run["validation_loss"], run["options"]["seed"], run["state"], facts["plot"]) == (2.0, 3, "finished", None)
    assert not list(tmp_path.glob("**/*.png"))
    picture = tmp_path / "new" / "x.png"
    shown(tmp_path, json=True, plot=picture)
    assert json.loads(capsys.readouterr().out)["plot"] == str(picture)
    assert picture.exists()
    with pytest.raises(LineartimeError, match=r"Cannot write .*/x.png/y.png: "):
        shown(tmp_path, plot=picture / "y.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    capsys.readouterr()
    shown(tmp_path)  # a picture that nobody has asked for
    assert "No plot: A plot needs matplotlib" in capsys.readouterr().err
    with pytest.raises(LineartimeError, match=r"pip install 'lineartime\[plot\]'"):
        shown(tmp_path, plot=picture)


def test_options_are_shown_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same: dict[str, Any] = {"batch_size": 4, "out": "x"}
    make_run(tmp_path / "a", best=2.0, learning_rate=0.003, override=("d_model=16",), **same, workers=2)  # of a later version
    make_run(tmp_path / "b", best=3.0, learning_rate=0.01, override=(), **{**same, "out": "y", "track": ["wandb"]})
    shown(tmp_path)
    header, first, second = rows(capsys.readouterr().out)
    assert header[-3:] == ["learning_rate", "workers", "d_model"]
    assert first[-3:] == ["0.003", "2", "16"]
    assert second[-3:] == ["0.01", "-", "-"]


def test_a_run_on_several_texts_names_all_of_them_beside_one_of_an_earlier_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", data=["/texts/books", "hub:org/news"], text_column="text")
    make_run(tmp_path / "b")
    make_run(tmp_path / "c", data=None)
    shown(tmp_path)
    text = capsys.readouterr().out
    assert "text books news" in text  # the title of its group
    assert "text the Python standard library\n" in text  # the default
    assert "text_column" not in text


def test_a_narrow_terminal_loses_columns_and_is_told_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, name in enumerate(("a-run-with-a-name", "b")):
        make_run(tmp_path / name, **dict.fromkeys("abcdef", value))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("rich.console.Console.size", ConsoleDimensions(80, 25))
    shown(tmp_path)
    text = capsys.readouterr().out
    assert "The screen is too narrow for waiting, tokens, training, " in text
    assert "2 more options differ: e, f (--json has everything)." in text
    table = [line for line in text.splitlines() if not line.startswith(("The screen", "plot", "2 more"))]
    assert max(map(len, table)) <= 80
    assert {"run", "step", "validation", "state"} <= set(rows(text)[0])
    monkeypatch.undo()
    shown(tmp_path)  # what tells runs apart is never left out of a file
    text = capsys.readouterr().out
    assert rows(text)[0][-6:] == ["a", "b", "c", "d", "e", "f"]
    assert "too narrow" not in text


def test_runs_are_ranked_only_beside_those_with_their_text_tokenizer_and_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", best=3.0)
    make_run(tmp_path / "b", best=2.0)
    make_run(tmp_path / "c", best=1.0, tokenizer="bpe-8000")
    make_run(tmp_path / "d", best=0.5, task="mlm")
    make_run(tmp_path / "e", best=0.2, data="/other/books")
    shown(tmp_path)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    found = [line.split("  ")[0] for line in lines if line.startswith(("text", "a ", "b ", "c ", "d ", "e "))]
    assert found == [
        *("text /other/books, tokenizer bytes, task clm", "e"),
        *("text /texts/books, tokenizer bpe-8000, task clm", "c"),
        *("text /texts/books, tokenizer bytes, task clm", "b", "a"),
        *("text /texts/books, tokenizer bytes, task mlm", "d"),
    ]


def test_a_run_that_began_from_another_is_in_its_group(tmp_path: Path) -> None:
    def summary(name: str, tokenizer: str | None, definition: str) -> RunSummary:
        run = make_run(tmp_path / name, tokenizer=tokenizer)
        (run / "step-00000040").mkdir()
        (run / "step-00000040" / "tokenizer.json").write_text(definition)
        return summarize(run, name)[0]

    first, tuned = summary("first", "bpe-300", "bpe"), summary("tuned", str(tmp_path / "first" / "step-00000040"), "bpe")
    other = summary("other", None, "bytes")
    assert [(group.title, len(group.runs)) for group in group_runs([tuned, first, other])] == [
        ("tokenizer bpe-300", 2),
        ("tokenizer bytes", 1),
    ]


def test_inside_a_group_bits_per_byte_rank_and_nats_where_a_run_has_none(tmp_path: Path) -> None:
    def summary(name: str, nats: float | None, bits: float | None) -> RunSummary:
        run, _ = summarize(make_run(tmp_path / name), name)
        return dataclasses.replace(run, validation_loss=nats, bits_per_byte=bits)

    runs = [summary("a", None, None), summary("b", 2.0, 4.0), summary("c", 3.0, 2.0)]
    assert [run.name for run in group_runs(runs)[0].runs] == ["c", "b", "a"]
    [group] = group_runs([*runs, summary("d", 1.0, None)])
    assert [run.name for run in group.runs] == ["d", "b", "c", "a"]
    assert group.title == ""


def test_a_run_that_an_error_ended_says_so_until_it_is_resumed(
    config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config().run_directory
    message = "The validation loss became nan at step 2: start another run in another folder, with `learning_rate` below 0.003"
    with monkeypatch.context() as patch:
        values = iter([5.0, math.nan])
        patch.setattr(Validation, "loss", lambda self, stop: next(values))
        with pytest.raises(LineartimeError, match=message):
            train(config(steps=2))
    capsys.readouterr()
    shown(run)
    shown_text = capsys.readouterr().out
    assert rows(shown_text)[1][-1] == "failed"  # and not finished, though it has taken all of its steps
    assert f"{run} failed: {message}".replace("`learning_rate`", "--learning-rate") in shown_text
    shown(run, json=True)
    [facts] = json.loads(capsys.readouterr().out)["runs"]
    assert (facts["state"], facts["error"].startswith(message)) == ("failed", True)
    with pytest.raises(
        LineartimeError, match=r"already holds a run, which failed \(The validation loss .*\): give another `out`"
    ):
        train(config(steps=2))
    assert summarize(run, "")[0].state == "failed"  # what was refused has not touched it
    train(config(steps=2, resume=True))
    assert (summarize(run, "")[0].state, summarize(run, "")[0].error) == ("finished", None)


def test_damaged_files_are_named_and_the_other_runs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "whole")
    make_run(tmp_path / "one", best=2.5)
    (tmp_path / "one" / "run.json").write_text("{")
    make_run(tmp_path / "two", best=3.0)
    with (tmp_path / "two" / "metrics.jsonl").open("a") as file:
        file.write("rubbish\n")
    make_run(tmp_path / "three")
    (tmp_path / "three" / "metrics.jsonl").unlink()
    (tmp_path / "three" / "metrics.jsonl").mkdir()
    shown(tmp_path)
    captured = capsys.readouterr()
    found = [row[0] for row in rows(captured.out)]
    assert found == ["text", "run", "whole", "two", "three", "unknown", "run", "one"]  # two groups with titles and headers
    assert sorted(captured.err.splitlines()) == [
        f"{tmp_path}/one/run.json is damaged (it is not JSON: Expecting property name enclosed in double quotes at line 1, "
        "column 2): restore it from a copy, or delete it; training does not need it.",
        f"{tmp_path}/two/metrics.jsonl has 1 damaged line, skipped here (line 45: it is not JSON: "
        "Expecting value at line 1, column 1): restore it from a copy if you have one.",
        f"Cannot read {tmp_path}/three/metrics.jsonl: Is a directory; check the path and its permissions, then try again.",
    ]
