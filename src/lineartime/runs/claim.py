"""One process works on a run at a time: the lock in its folder."""

from pathlib import Path
from typing import IO

from lineartime.errors import LineartimeError, cannot

LOCK_FILE = ".lock"


def is_claimed(run: Path) -> bool:
    """Whether a run of this machine is in a folder now."""
    if not (run / LOCK_FILE).exists():
        return False
    try:
        claim(run).close()
    except LineartimeError:
        return True
    return False


def claim(run: Path) -> IO[str]:
    """Lock a run's folder until the file is closed; LineartimeError if another run is in there."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK_FILE).open("w", encoding="utf-8")
    except OSError as error:
        raise cannot("write", f"--out {run}", error) from None
    try:
        import fcntl
    except ImportError:  # another kind of system, on which nobody is kept out
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it when the process ends, however it ends
    except BlockingIOError:
        file.close()
        raise LineartimeError(
            f"--out {run} is in use by another run that is going on: wait for its end, or give another folder."
        ) from None
    except OSError:  # a disk that knows no locks
        pass
    return file
