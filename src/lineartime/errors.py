"""The errors that a user can fix: the command line shows them without a traceback."""

import errno


class LineartimeError(Exception):
    """Something the user can fix: the message is one sentence that names what is wrong and says what to do."""


class ArgumentError(LineartimeError, ValueError):
    """An argument with a value that it does not allow.

    The message is `argument` and `predicate`: "batch_size is 0, but must be at least 1." The command line replaces the argument
    by its flag and keeps the predicate.

    Args:
        argument: the name of the argument, as it stands in Python.
        predicate: the rest of the sentence: the value, what is allowed, what to do.
    """

    def __init__(self, argument: str, predicate: str) -> None:
        super().__init__(argument, predicate)  # both, so that the error survives pickling between processes
        self.argument = argument
        self.predicate = predicate

    def __str__(self) -> str:
        return f"{self.argument} {self.predicate}"


class ReportedError(LineartimeError):
    """An error that another process of the same run reports, so that this process stays quiet."""


def missing_extra(package: str, extra: str, purpose: str) -> LineartimeError:
    """The error for a package that only one extra of lineartime installs."""
    return LineartimeError(f"{purpose} needs {package}, which is not installed: pip install 'lineartime[{extra}]'.")


def cannot(action: str, path: object, error: OSError, then: str = "run the command again") -> LineartimeError:
    """The error for a file that the operating system refuses to `action` ("read", "write"), with what to do `then`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "check the path and its permissions"
    return LineartimeError(f"Cannot {action} {path}: {error.strerror or error}; {advice}, then {then}.")
