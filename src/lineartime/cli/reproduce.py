"""`lineartime reproduce`: the paper's experiments."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from lineartime.experiments.config import ReproduceConfig


@dataclass(frozen=True)
class Options(ReproduceConfig):
    """Train the models that an experiment of the paper compares, one process per run, and show results beside the paper's."""

    name: tyro.conf.Positional[str] = ReproduceConfig.name
    list: tyro.conf.FlagCreatePairsOff[bool] = ReproduceConfig.list
    report: tyro.conf.FlagCreatePairsOff[bool] = ReproduceConfig.report


def run(options: Options, arguments: Sequence[str]) -> None:
    """Run what is missing and write the report; after an interrupt, KeyboardInterrupt names the command that resumes it."""
    from lineartime.experiments.command import reproduce

    if reproduce(ReproduceConfig(**vars(options))).interrupted:
        raise KeyboardInterrupt(f"resume by: {shlex.join(['lineartime', 'reproduce', *arguments])}")
