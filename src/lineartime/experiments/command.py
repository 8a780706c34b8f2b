"""One call of `reproduce`, from its options to its files."""

from lineartime.errors import ArgumentError
from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.estimate import HOW, describe, describe_all
from lineartime.experiments.folder import with_device, with_saved_options
from lineartime.experiments.plan import make_plan
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import RunsResult, run_all
from lineartime.experiments.texts import check_given, text_notes
from lineartime.screen import SCREEN

FAILED = "Some runs failed: they are named above and in the report."


def reproduce(config: ReproduceConfig) -> RunsResult:
    """List experiments, or run the missing parts of one and write its report.

    Results go to standard output, and what happens meanwhile to standard error.

    Raises:
        LineartimeError: for anything the user can fix; what has been done stays.
    """
    given = config
    if config.name in EXPERIMENTS:
        config = with_saved_options(config)
    if config.list:
        given.check()
        check_given(given)
        if config.name:
            lines = describe(make_plan(config))
        else:
            lines = describe_all(config)
        for line in lines:
            print(line, flush=True)
        if not config.name:
            print(f"The times are {HOW}.")
        return RunsResult()
    if not config.name:
        raise ArgumentError("name", f"is missing: give an experiment, {', '.join(EXPERIMENTS)}.")
    plan = make_plan(config if config.report else with_device(config))
    for name, note in text_notes(plan).items() if not config.report else ():
        _say(f"{name} ({note})")
    result = RunsResult() if config.report else run_all(plan, _say)
    file, report, notes = write_report(plan)
    for note in notes:
        _say(note)
    for problem in report["problems"] if config.report else ():
        _say(problem)
    if report["missing"]:
        _say(f"{len(report['missing'])} runs are missing in the report.")
    print(f"report: {file}")
    return result


def _say(line: str) -> None:
    print(line, file=SCREEN, flush=True)
