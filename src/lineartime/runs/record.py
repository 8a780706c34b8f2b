"""run.json: the options of a run, and for each process that trained it the command, versions, machine, git state and error.

It holds no environment variables and no URLs of repositories, because both can contain secrets. Beside it in the
run's folder, a lock admits one training run at a time.
"""

import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from lineartime.checkpoint import known_options, list_checkpoints
from lineartime.choices import DEFAULT_TEXT
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors, typed_first_line
from lineartime.files import RECORD_FILE, is_there, read_file, write_file
from lineartime.host import installed_version, processor_name, threads_in_words

WITHOUT_EFFECT = ("out", "resume", "auto_resume", "cache", "track", "timeout", "max_time", "keep_every")
"""Options that change neither what a run learns nor how fast."""
_PACKAGES = ("lineartime", "torch", "triton", "numpy", "safetensors", "tokenizers", "datasets", "pyarrow")
LOCK_FILE = ".lock"
_PAUSES = (0.05, 0.1, 0.2, 0.0)
"""Seconds after each attempt to lock: `is_locked` may hold the lock for a moment."""


@dataclass(frozen=True)
class Git:
    """The git repository in which a process was started; earlier versions noted the branch, too."""

    commit: str | None = None
    branch: str | None = None
    changed: bool = False


@dataclass(frozen=True)
class Machine:
    """The machine of a process; `threads` are PyTorch's, and `processes` those of the whole run."""

    system: str = ""
    processor: str = ""
    cores: int | None = None
    threads: int | None = None
    processes: int = 1
    gpus: tuple[str, ...] = ()
    cuda: str | None = None


@dataclass(frozen=True)
class Process:
    """A process that trained a run."""

    time: str = ""  # when it started, in ISO 8601 format
    command: tuple[str, ...] = ()  # the program and its arguments
    changed_options: dict[str, Any] = field(default_factory=dict)  # the options that differ from the run's
    versions: dict[str, str] = field(default_factory=dict)  # of Python and packages
    machine: Machine = Machine()
    git: Git | None = None  # None without a repository
    error: str | None = None  # the message of the error that ended it

    def __str__(self) -> str:
        """The machine and the versions that its numbers depend on."""
        machine, versions = self.machine, self.versions
        where = ", ".join(machine.gpus) or f"{machine.processor}, {threads_in_words(machine.threads)}"
        return f"{where}; torch {versions.get('torch')}, Python {versions.get('python')}"


@dataclass(frozen=True)
class Record:
    """A run: run.json."""

    options: dict[str, Any]  # those with which it was started, as JSON values
    processes: tuple[Process, ...]  # those that trained it, the first of which started it
    seed: int | None = None  # the option `seed`

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", known_options(self.options))

    @property
    def schedule(self) -> dict[str, Any]:
        """The options that another number of steps has changed, as the last process had them."""
        changed = self.processes[-1].changed_options if self.processes else {}
        return {name: changed[name] for name in ("steps", "decay_steps", "warmup_steps") if name in changed}


class RunRecord:
    """Writes run.json in the main process of a run: `begin` before the first step, `errors` if an error ends the run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._record: Record | None = None

    def begin(self, config: dict[str, Any], command: Sequence[str]) -> None:
        """Write the record when a process starts to train a run, before the first checkpoint of a new run.

        A run with checkpoints is being resumed. Its record keeps the options with which it was started, and gets this process
        with the options that differ. Raises LineartimeError if the file is damaged, or cannot be written.
        """
        options = json.loads(json.dumps(config))  # as `read_record` returns them
        record = Record(options, (), options.get("seed"))
        if list_checkpoints(self._run) and (self._run / RECORD_FILE).exists():
            record = read_record(self._run)
        changed = {name: value for name, value in options.items() if value != record.options.get(name)}
        process = dataclasses.replace(this_process(), command=tuple(command), changed_options=changed)
        self._record = dataclasses.replace(record, processes=(*record.processes, process))
        self._write(self._record)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Record the message of an error that ends the `with` block with this process, if `begin` was called."""
        try:
            yield
        except Exception as error:
            if self._record is not None and (self._run / RECORD_FILE).exists():  # a new run may have left nothing
                message = typed_first_line(error)
                *others, own = self._record.processes
                with suppress(LineartimeError):  # the error itself is what matters
                    failed = dataclasses.replace(own, error=message)
                    self._write(dataclasses.replace(self._record, processes=(*others, failed)))
            raise

    def _write(self, record: Record) -> None:
        write_file(self._run / RECORD_FILE, json.dumps(dataclasses.asdict(record), indent=2) + "\n")


def last_error(record: Record) -> str | None:
    """The message of the error that ended the last process of a run; None without one, or if the run was resumed since."""
    return record.processes[-1].error if record.processes else None


def texts_of(options: Mapping[str, Any]) -> list[str]:
    """The texts that a run with these options reads, by path or name."""
    data = options.get("data") or DEFAULT_TEXT
    return [data] if isinstance(data, str) else [str(text) for text in data]


def read_record(run: str | Path) -> Record:
    """Read run.json. Raises LineartimeError if it is missing or damaged."""
    return read_file(Path(run, RECORD_FILE), Record, "restore it from a copy, or delete it; training does not need it")


def this_process() -> Process:
    """This process as it is now, with its machine, without its command."""
    import torch  # needed only for training: records are read without PyTorch

    found = {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    versions = {"python": platform.python_version(), **found, "torch": torch.__version__}  # its metadata may lack the build
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    machine = Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=processor_name(),
        cores=os.cpu_count(),
        threads=torch.get_num_threads(),
        processes=torch.distributed.get_world_size() if distributed else 1,
        gpus=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        cuda=torch.version.cuda,
    )
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Process(time=now, versions=versions, machine=machine, git=_git())


def _git() -> Git | None:
    """The commit in the working directory, and whether tracked files differ; None without git or a commit."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    read_only = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        found = subprocess.run(command, capture_output=True, check=True, timeout=10, env=read_only).stdout.decode().strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return Git(found.removesuffix("-dirty"), changed=found.endswith("-dirty"))


def is_locked(run: Path) -> bool:
    """Whether a process of this machine is training in a folder now."""
    try:
        import fcntl

        with (run / LOCK_FILE).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # not a POSIX system, no lock, one that may not be read, or a file system without locks
        return False
    return False


@contextmanager
def locked(folder: Path, *, keep: bool = False) -> Iterator[None]:
    """Lock a folder as `lock_run`, for a `with` block; then delete the lock.

    With `keep`, it stays unless nothing else is there. A folder that was created for it and is empty is deleted.
    """
    existed = is_there(folder)
    lock = lock_run(folder)
    try:
        yield
    finally:
        # A process that opens the file before it is deleted cannot lock it yet. Windows deletes no open file.
        with lock, suppress(OSError):
            if not keep or [path.name for path in folder.iterdir()] == [LOCK_FILE]:
                (folder / LOCK_FILE).unlink()
                if not existed:
                    folder.rmdir()


def lock_run(run: Path) -> IO[str]:
    """Lock a run's folder, created if missing, until the returned file is closed.

    Raises LineartimeError if another run is using the folder, or if the folder cannot be written.
    """
    for seconds in _PAUSES:
        with reporting_file_errors("write", run):
            run.mkdir(parents=True, exist_ok=True)
            file = (run / LOCK_FILE).open("a", encoding="utf-8")
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it however the process ends
        except BlockingIOError:
            file.close()
            time.sleep(seconds)
            continue
        except (ImportError, OSError):  # not a POSIX system, or a file system without locks
            return file
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), (run / LOCK_FILE).stat()):
                return file
        file.close()  # a run that failed has deleted it since it was opened
    raise ArgumentError("out", f"is {run}, which another run is using: wait for its end, or use another folder.")
