"""Errors that a user can fix. The command line shows them without a traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class LineartimeError(Exception):
    """An error that the user can fix. Its message is one sentence that names what is wrong and says what to do."""


class ArgumentError(LineartimeError, ValueError):
    """An argument has a value that is not allowed.

    The message is the argument, then the predicate: "batch_size is 0, but must be at least 1." The command line puts the
    argument's flag in its place.

    Args:
        argument: the name of the argument in Python.
        predicate: the rest of the sentence: the value, what is allowed, what to do.
    """

    def __init__(self, argument: str, predicate: str) -> None:
        super().__init__(argument, predicate)  # both, so that a copy sent to another process is complete
        self.argument = argument
        self.predicate = predicate

    def __str__(self) -> str:
        return f"{self.argument} {self.predicate}"


class ReportedError(LineartimeError):
    """An error that another process of the run reports, so that this process stays quiet."""


def missing_extra(package: str, extra: str, purpose: str) -> LineartimeError:
    """The error for a missing package, which an extra of lineartime installs; `purpose` is what needs it."""
    return LineartimeError(f"{purpose} needs {package}, which is not installed: pip install 'lineartime[{extra}]'.")


def cannot(action: str, path: object, error: OSError, then: str = "run the command again") -> LineartimeError:
    """The error for a file that the system does not let us read or write (`action`), with what to do `then`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "check the path and its permissions"
    return LineartimeError(f"Cannot {action} {path}: {error.strerror or error}; {advice}, then {then}.")


@contextmanager
def reporting(action: str, path: object, then: str = "run the command again") -> Iterator[None]:
    """Turn an OSError of a block into the LineartimeError of `cannot`."""
    try:
        yield
    except OSError as error:
        raise cannot(action, path, error, then) from None
