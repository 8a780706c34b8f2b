"""run.json: the options of a run, and for each process that trained it the command, versions, machine, git state and error.

It holds no environment variables and no addresses of repositories: both can contain secrets.
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lineartime.checkpoint import list_checkpoints
from lineartime.errors import LineartimeError, reporting
from lineartime.files import write_atomically
from lineartime.host import installed_version, processor_name

RECORD_FILE = "run.json"
_PACKAGES = ("lineartime", "torch", "triton", "numpy", "safetensors", "tokenizers", "datasets", "pyarrow")


def write_record(run: Path, config: dict[str, Any], command: Sequence[str]) -> None:
    """Write run.json when a process starts to train a run, before the first checkpoint of a new run.

    A run with checkpoints is being resumed: its record keeps the options it was started with, and gets an entry for this
    process with the options that differ. `config` has all options as values for JSON, `command` the program and its arguments.

    Raises:
        LineartimeError: if the file cannot be written, or the run is resumed and its record is damaged.
    """
    options = json.loads(json.dumps(config))  # as `read_record` returns them
    record: dict[str, Any] = {"options": options, "seed": options.get("seed"), "processes": []}
    if list_checkpoints(run) and (run / RECORD_FILE).exists():
        record = read_record(run)
    started = record["options"]
    record["processes"].append(
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": list(command),
            "changed_options": {name: options[name] for name in options if options[name] != started.get(name)},
            "versions": _versions(),
            "machine": _machine(),
            "git": _git(),
        }
    )
    _write(run, record)


def _write(run: Path, record: Mapping[str, Any]) -> None:
    with reporting("write", run / RECORD_FILE):
        run.mkdir(parents=True, exist_ok=True)
        write_atomically(run / RECORD_FILE, json.dumps(record, indent=2) + "\n")


class RunRecord:
    """run.json as the main process of a run writes it: `begin` before the first step, `errors` if one ends it."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._entry: int | None = None

    def begin(self, config: dict[str, Any], command: Sequence[str]) -> None:
        """As `write_record`."""
        write_record(self._run, config, command)
        self._entry = len(read_record(self._run)["processes"]) - 1

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Write the sentence of an error that ends the block into the entry of this process, if it has begun one."""
        try:
            yield
        except Exception as error:
            if self._entry is not None:
                with suppress(LineartimeError, IndexError):  # the error itself is what matters
                    self._add_error(self._entry, error)
            raise

    def _add_error(self, entry: int, error: Exception) -> None:
        record = read_record(self._run)
        first_line = next(iter(str(error).strip().splitlines()), "")
        kind = "" if isinstance(error, LineartimeError) else type(error).__name__
        record["processes"][entry]["error"] = ": ".join(filter(None, (kind, first_line)))
        _write(self._run, record)


def last_error(record: Mapping[str, Any]) -> str | None:
    """The sentence of the error that ended the last process of a run; None if none did, or if the run was resumed since."""
    entry = record["processes"][-1] if record["processes"] else None
    error = entry.get("error") if isinstance(entry, dict) else None
    return error if isinstance(error, str) else None


def read_record(run: str | Path) -> dict[str, Any]:
    """The "options", "seed" and "processes" (the first started the run) in run.json; LineartimeError if missing or damaged."""
    file = Path(run, RECORD_FILE)
    try:
        with reporting("read", file):
            record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    fields = (("options", dict), ("processes", list))
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in fields):
        raise LineartimeError(f"{file} is damaged: restore it from a copy, or delete it; training does not need it.")
    return record


def _versions() -> dict[str, str]:
    import torch  # which only training needs: records are read without it

    found = {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    torch_with_build = {"torch": torch.__version__}  # the package metadata may lack the build
    return {"python": platform.python_version()} | found | torch_with_build


def _machine() -> dict[str, Any]:
    import torch

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": torch.distributed.get_world_size() if distributed else 1,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _git() -> dict[str, Any] | None:
    """Commit, branch and whether tracked files differ, in the working directory; None without git or a repository."""
    try:
        status = subprocess.run(
            ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"],
            capture_output=True,
            check=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # read only
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.splitlines()
    facts = dict(line.removeprefix("# ").split(" ", 1) for line in lines if line.startswith("# "))
    commit, branch = facts.get("branch.oid"), facts.get("branch.head")
    return {
        "commit": None if commit == "(initial)" else commit,
        "branch": None if branch == "(detached)" else branch,
        "changed": any(not line.startswith("# ") for line in lines),
    }
