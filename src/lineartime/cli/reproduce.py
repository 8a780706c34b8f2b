"""`lineartime reproduce`: the paper's experiments."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from lineartime.experiments.config import ReproduceConfig


@dataclass(frozen=True)
class ReproduceOptions(ReproduceConfig):
    """The options of `lineartime reproduce`."""

    name: tyro.conf.Positional[str] = ReproduceConfig.name

    def __post_init__(self) -> None:
        """Leave the checks to `ReproduceConfig`: tyro would show its errors as those of the parser."""


def run(options: ReproduceOptions, arguments: Sequence[str]) -> None:
    """Run what is missing and write the report.

    Raises:
        KeyboardInterrupt: after an interrupt; it names the command that resumes.
        LineartimeError: if runs failed.
    """
    from lineartime.experiments.command import reproduce

    try:
        reproduce(ReproduceConfig(**vars(options)))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"resume by: {shlex.join(['lineartime', 'reproduce', *arguments])}") from None
