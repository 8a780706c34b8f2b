"""The lock in a run's folder, which admits one training run at a time."""

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from lineartime.errors import ArgumentError, reporting_file_errors

LOCK_FILE = ".lock"
_PAUSES = (0.05, 0.1, 0.2, 0.0)
"""Seconds after each attempt to lock: `is_locked` may hold the lock for a moment."""


def is_locked(run: Path) -> bool | None:
    """Whether a process is training in a folder now; None if it may be on another machine."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: no lock
        return None
    try:
        with (run / LOCK_FILE).open(encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once
            machine = file.read(1000)
    except BlockingIOError:
        return True
    except OSError:  # no lock, one that may not be read, or a file system without locks
        return None
    return False if machine == platform.node() != "" else None


def lock_run(run: Path) -> IO[str]:
    """Lock a run's folder, created if missing, until the returned file is closed. The lock names the machine.

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
        if _is_current(file, run):
            with suppress(OSError):  # a full disk is reported by what has to be saved
                file.truncate(0)
                os.write(file.fileno(), os.fsencode(platform.node()))
            return file
        file.close()  # a run that failed has deleted it since it was opened
    raise ArgumentError("out", f"is {run}, which another run is using: wait for its end, or use another folder.")


def _is_current(file: IO[str], run: Path) -> bool:
    """Whether an open lock is still the one in the folder."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), (run / LOCK_FILE).stat())
    except FileNotFoundError:
        return False
