import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lineartime.errors import LineartimeError
from lineartime.runs.record import Git, RunRecord, last_error, read_record

COMMAND = ["lineartime", "train", "--seed", "7"]
OPTIONS = {"seed": 7, "override": ("d_model=16",), "precision": "fp32", "resume": False}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a commit, in a remote place whose address holds a password."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    (folder / "file").write_text("one")
    for arguments in (
        ["init", "--initial-branch", "main"],
        ["remote", "add", "origin", "https://me:password@example.org/x.git"],
        ["add", "file"],
        ["-c", "user.name=me", "-c", "user.email=me@example.org", "commit", "-m", "one"],
    ):
        subprocess.run(["git", *arguments], check=True, capture_output=True)
    return folder


def begin_checkpoint(run: Path) -> None:
    (run / "step-00000001").mkdir()


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
    begin_checkpoint(tmp_path)
    RunRecord(tmp_path).begin({**OPTIONS, "precision": "bf16", "resume": True}, [*COMMAND, "--resume"])
    record = read_record(tmp_path)
    assert record.options["precision"] == "fp32"
    assert [process.changed_options for process in record.processes] == [{}, {"precision": "bf16", "resume": True}]
    assert record.processes[1].command[-1] == "--resume"


def test_record_tells_the_state_of_git_and_never_where_it_comes_from(repository: Path, tmp_path: Path) -> None:
    def git() -> Git | None:
        RunRecord(tmp_path / "run").begin(OPTIONS, COMMAND)
        return read_record(tmp_path / "run").processes[-1].git

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    (repository / "run-folder").mkdir()  # an untracked file changes nothing that was run
    (repository / "run-folder" / "metrics").write_text("")
    assert git() == Git(commit, "main", changed=False)
    (repository / "file").write_text("two")
    assert git() == Git(commit, "main", changed=True)
    subprocess.run(["git", "checkout", "--detach"], check=True, capture_output=True)
    assert git() == Git(commit, None, changed=True)
    assert "password" not in (tmp_path / "run" / "run.json").read_text()


def test_neither_git_nor_a_repository_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    RunRecord(tmp_path).begin(OPTIONS, COMMAND)
    assert read_record(tmp_path).processes[0].git is None
    subprocess.run(["git", "init", "--initial-branch", "main"], check=True, capture_output=True)
    RunRecord(tmp_path).begin(OPTIONS, COMMAND)
    assert read_record(tmp_path).processes[0].git == Git(None, "main", changed=False)
    monkeypatch.setenv("PATH", "")
    RunRecord(tmp_path).begin(OPTIONS, COMMAND)
    assert read_record(tmp_path).processes[0].git is None


@pytest.mark.parametrize("content", ["{", '{"options": {}}'])
def test_damaged_record_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(LineartimeError, match=r"run.json is damaged \(.*\): restore it from a copy, or delete it"):
        read_record(tmp_path)


def test_record_that_is_not_there_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match=r"Cannot read .*run.json: No such file"):
        read_record(tmp_path)
    (tmp_path / "run.json").mkdir()
    with pytest.raises(LineartimeError, match=r"Cannot write .*run.json: Is a directory"):
        RunRecord(tmp_path).begin(OPTIONS, COMMAND)


def test_schedule_of_a_record_is_that_of_its_last_process(tmp_path: Path) -> None:
    RunRecord(tmp_path).begin(OPTIONS, COMMAND)
    (tmp_path / "step-00000002").mkdir()
    assert read_record(tmp_path).schedule == {}
    RunRecord(tmp_path).begin({**OPTIONS, "steps": 90, "precision": "bf16"}, COMMAND)
    assert read_record(tmp_path).schedule == {"steps": 90}
    RunRecord(tmp_path).begin({**OPTIONS, "steps": 120}, COMMAND)
    assert read_record(tmp_path).schedule == {"steps": 120}


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("first line\nsecond"), "RuntimeError: first line"),
        (LineartimeError("The text is damaged: restore it."), "The text is damaged: restore it."),
    ],
)
def test_error_that_ends_a_process_is_on_record_until_the_next_one(tmp_path: Path, error: Exception, sentence: str) -> None:
    begin_checkpoint(tmp_path)
    record = RunRecord(tmp_path)
    record.begin(OPTIONS, COMMAND)
    with pytest.raises(type(error)), record.errors():
        raise error
    assert last_error(read_record(tmp_path)) == sentence
    RunRecord(tmp_path).begin(OPTIONS, COMMAND)
    assert [process.error for process in read_record(tmp_path).processes] == [sentence, None]
