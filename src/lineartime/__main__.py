"""The command `lineartime`, also as `python -m lineartime`."""

import signal
import sys
import warnings

from lineartime.host import let_threads_sleep
from lineartime.screen import SCREEN


def main() -> int:
    """Run the command line and return its exit status.

    An interrupt ends it with one line, even while PyTorch is being imported, where it may surface as another error.
    """
    interrupted = False
    let_threads_sleep()
    warnings.formatwarning = _one_line

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as in a background job
        signal.signal(signal.SIGINT, interrupt)
    try:
        from lineartime.cli import main as run

        return run()
    except BaseException as error:
        if not interrupted and not isinstance(error, KeyboardInterrupt):
            raise
        print("stopped", file=SCREEN)
        return 130


def _one_line(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning for the command line, without the line of code that raised it."""
    return f"warning: {message}\n"


if __name__ == "__main__":
    sys.exit(main())
