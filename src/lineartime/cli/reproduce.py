"""`lineartime reproduce`: the paper's experiments."""

import shlex
from collections.abc import Sequence

from lineartime.experiments.config import ReproduceConfig as ReproduceOptions


def run(options: ReproduceOptions, arguments: Sequence[str]) -> None:
    """Run what is missing and write the report.

    Raises:
        KeyboardInterrupt: after an interrupt; it names the command that resumes.
        LineartimeError: if runs failed.
    """
    from lineartime.experiments.command import reproduce

    try:
        reproduce(options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"resume by: {shlex.join(['lineartime', 'reproduce', *arguments])}") from None
