"""The one kind of error that a command shows without a traceback."""

import errno


class LineartimeError(Exception):
    """Something the user can mend: the message is one sentence that names what is wrong and says what to do."""


class ReportedError(LineartimeError):
    """What another process of the same run says to the user, so that this one need not."""


def missing_extra(package: str, extra: str, purpose: str) -> LineartimeError:
    """The error for a package that only one extra of lineartime brings."""
    return LineartimeError(f"{purpose} needs {package}, which is not installed: pip install 'lineartime[{extra}]'.")


def cannot(action: str, path: object, error: OSError, then: str = "run the command again") -> LineartimeError:
    """The error for a file that the operating system refuses to `action` ("read", "write"), with what to do `then`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space" if full else "check the path and its permissions"
    return LineartimeError(f"Cannot {action} {path}: {error.strerror or error}; {advice}, then {then}.")
