"""The lock in a run's folder, which admits one training run at a time."""

from pathlib import Path
from typing import IO

from lineartime.errors import ArgumentError, LineartimeError, reporting

LOCK_FILE = ".lock"


def is_claimed(run: Path) -> bool:
    """Whether a process of this machine is training in a folder now."""
    if not (run / LOCK_FILE).exists():
        return False
    try:
        claim(run).close()
    except LineartimeError:
        return True
    return False


def claim(run: Path) -> IO[str]:
    """Lock a run's folder, created if missing, until the returned file is closed.

    Raises LineartimeError if another run is using the folder, or if the folder cannot be written.
    """
    with reporting("write", run):
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK_FILE).open("w", encoding="utf-8")
    try:
        import fcntl
    except ImportError:  # not a POSIX system: no lock
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it however the process ends
    except BlockingIOError:
        file.close()
        raise ArgumentError("out", f"is {run}, which another run is using: wait for its end, or use another folder.") from None
    except OSError:  # a file system without locks
        pass
    return file
