import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lineartime.errors import LineartimeError
from lineartime.runs.record import Git, RunRecord, last_error, read_record

COMMAND = ["lineartime", "train", "--seed", "7"]
OPTIONS = {"seed": 7, "override": ("d_model=16",), "precision": "fp32", "resume": False}


def test_record_tells_options_command_versions_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    RunRecord(tmp_path / "run").begin(OPTIONS, COMMAND)
    record = read_record(tmp_path / "run")
    assert record.options == {**OPTIONS, "override": ["d_model=16"]}
    assert record.seed == 7
    (process,) = record.processes
    assert process.command == tuple(COMMAND)
    assert process.changed_options == {}
    assert process.versions["torch"] == torch.__version__
    assert process.versions["lineartime"]
    assert process.versions["python"] == sys.version.split()[0]
    assert process.machine.threads == torch.get_num_threads()
    assert process.machine.processes == 1
    assert process.machine.processor
    assert process.time.endswith("+00:00")
    assert "hunter2" not in (tmp_path / "run" / "run.json").read_text()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.json"]


def test_process_that_goes_on_is_added_with_what_it_changes(tmp_path: Path) -> None:
    for seed in (3, 7):  # the first left no checkpoint
        RunRecord(tmp_path).begin({**OPTIONS, "seed": seed}, COMMAND)
    (tmp_path / "step-00000001").mkdir()  # a checkpoint
    RunRecord(tmp_path).begin({**OPTIONS, "precision": "bf16", "resume": True}, [*COMMAND, "--resume"])
    record = read_record(tmp_path)
    assert record.options["precision"] == "fp32"
    assert [process.changed_options for process in record.processes] == [{}, {"precision": "bf16", "resume": True}]
    assert record.processes[1].command[-1] == "--resume"
    assert record.schedule == {}
    for steps in (90, 120):
        RunRecord(tmp_path).begin({**OPTIONS, "steps": steps, "precision": "bf16"}, COMMAND)
        assert read_record(tmp_path).schedule == {"steps": steps}  # of the last process


def test_record_tells_the_state_of_git_if_there_is_one_and_never_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded() -> Git | None:
        RunRecord(tmp_path / "run").begin(OPTIONS, COMMAND)
        return read_record(tmp_path / "run").processes[-1].git

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert recorded() is None
    git("init", "--initial-branch", "main")
    assert recorded() is None  # no commit yet
    git("remote", "add", "origin", "https://me:password@example.org/x.git")
    Path("file").write_text("one")
    git("add", "file")
    git("-c", "user.name=me", "-c", "user.email=me@example.org", "commit", "-m", "one")
    Path("untracked").touch()  # which changes nothing that was run
    commit = git("rev-parse", "HEAD")
    assert recorded() == Git(commit, changed=False)
    Path("file").write_text("two")
    assert recorded() == Git(commit, changed=True)
    assert "password" not in (tmp_path / "run" / "run.json").read_text()
    monkeypatch.setenv("PATH", "")
    assert recorded() is None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("first line\nsecond"), "RuntimeError: first line"),
        (LineartimeError("The text is damaged: restore it."), "The text is damaged: restore it."),
    ],
)
def test_error_that_ends_a_process_is_on_record_until_the_next_one(tmp_path: Path, error: Exception, sentence: str) -> None:
    (tmp_path / "step-00000001").mkdir()  # a checkpoint
    record = RunRecord(tmp_path)
    record.begin(OPTIONS, COMMAND)
    with pytest.raises(type(error)), record.errors():
        raise error
    assert last_error(read_record(tmp_path)) == sentence
    RunRecord(tmp_path).begin(OPTIONS, COMMAND)
    assert [process.error for process in read_record(tmp_path).processes] == [sentence, None]
