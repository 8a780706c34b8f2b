"""Errors that a user can fix. The command line shows them without a traceback.

A message writes other arguments in backticks, as Python does: "`steps=600`", which is --steps 600 on the command line.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec


class LineartimeError(Exception):
    """An error that the user can fix. Its message is one sentence that names what is wrong and says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message  # subclasses replace `args`, which copies an error to another process

    def __str__(self) -> str:
        return self.message


class DivergedError(LineartimeError):
    """Training diverged: the same steps would diverge again."""


class ArgumentError(LineartimeError, ValueError):
    """An argument has a value that is not allowed.

    The message is the argument, then the predicate: "batch_size is 0, but must be at least 1."

    Args:
        argument: the name of the argument in Python.
        predicate: the rest of the sentence: the value, what is allowed, what to do.
    """

    def __init__(self, argument: str, predicate: str) -> None:
        super().__init__(f"{argument} {predicate}")
        self.argument, self.predicate = argument, predicate
        self.args = (argument, predicate)


def missing_extra(package: str, extra: str, purpose: str) -> LineartimeError:
    """The error for a missing package, which an extra of lineartime installs; `purpose` is what needs it."""
    return LineartimeError(f"{purpose} needs {package}, which is not installed: pip install 'lineartime[{extra}]'.")


def is_installed(package: str) -> bool:
    """Whether a package is installed, without importing it. A folder of that name that is no package does not count."""
    try:
        found = find_spec(package)
    except ValueError:  # of a module that a script has put there itself
        return True
    return found is not None and found.origin is not None


def require_packages(*packages: str, extra: str, purpose: str) -> None:
    """Raise `missing_extra` for the first package that is not installed; none is imported."""
    for package in packages:
        if not is_installed(package):
            raise missing_extra(package, extra, purpose)


def check_choice(argument: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ArgumentError unless `value` is one of the `allowed` names of `argument`."""
    if value not in allowed:
        raise ArgumentError(argument, f"is {value!r}, but must be one of {', '.join(map(repr, allowed))}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Up to three known names like a wrong one, which may be their first part, in parentheses for a message; empty if none."""
    names = list(known)
    like = [longer for longer in names if longer.startswith(f"{name}-")][:3] or get_close_matches(name, names, n=3, cutoff=0.75)
    return f" (did you mean {' or '.join(like)}?)" if like else ""


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def typed_first_line(error: Exception) -> str:
    """The first line of the message of an error, after its type if it is one of another library."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, LineartimeError) or line == kind else f"{kind}: {line}"


def file_error(action: str, path: object, error: OSError, then: str = "try again") -> LineartimeError:
    """The error for a file that we cannot read or write (`action`). `then` says what to do next."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "check the path and its permissions"
    return LineartimeError(f"Cannot {action} {path}: {error.strerror or error}; {advice}, then {then}.")


@contextmanager
def reporting_file_errors(action: str, path: object, then: str = "try again") -> Iterator[None]:
    """Turn an OSError in a `with` block into the LineartimeError of `file_error`."""
    try:
        yield
    except OSError as error:
        raise file_error(action, path, error, then) from None
