"""One call of `reproduce`, from its options to its files."""

from dataclasses import dataclass

from lineartime.errors import ArgumentError
from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.estimate import HOW, describe, describe_all
from lineartime.experiments.folder import adopted
from lineartime.experiments.plan import make_plan
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import run_all
from lineartime.screen import SCREEN

FAILED = "Some runs failed: they are named above and in the report."


@dataclass(frozen=True)
class Ended:
    """How a call ended: whether it was interrupted, and how many runs failed."""

    interrupted: bool = False
    failed: int = 0


def reproduce(config: ReproduceConfig) -> Ended:
    """List experiments, or run the missing parts of one and write its report.

    Results go to standard output, and what happens meanwhile to standard error.

    Raises:
        LineartimeError: for anything the user can fix; what has been done stays.
    """
    if config.name in EXPERIMENTS:
        config = adopted(config)
    if config.list:
        if config.name:
            lines = describe(make_plan(config))
        else:
            config.check()
            lines = describe_all(config)
        for line in lines:
            print(line, flush=True)
        if not config.name:
            print(f"The times are {HOW}.")
        return Ended()
    if not config.name:
        raise ArgumentError("name", f"is missing: give an experiment, {', '.join(EXPERIMENTS)}.")
    plan = make_plan(config)
    ended = Ended()
    if not config.report:
        progress = run_all(plan, _say)
        ended = Ended(progress.interrupted, len(progress.problems))
    file, report, notes = write_report(plan)
    for note in notes:
        _say(note)
    for problem in report["problems"] if config.report else ():
        _say(problem)
    if report["missing"]:
        _say(f"{len(report['missing'])} runs are missing in the report.")
    print(f"report: {file}")
    return ended


def _say(line: str) -> None:
    print(line, file=SCREEN, flush=True)
