"""One call of `reproduce`, from its options to its files."""

from lineartime.data import load_corpus, missing_split
from lineartime.errors import ArgumentError
from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.estimate import describe, describe_all, text_notes, time_left
from lineartime.experiments.folder import with_device, with_saved_options
from lineartime.experiments.plan import make_plan
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import RunsResult, run_all
from lineartime.screen import SCREEN

FAILED = "Some runs failed: they are named above and in the report."


def reproduce(config: ReproduceConfig) -> RunsResult:
    """List experiments, or run the missing parts of one and write its report; what happens meanwhile goes to standard error.

    Raises LineartimeError for anything the user can fix; what has been done stays.
    """
    config.check()
    given = config
    if config.name in EXPERIMENTS:
        config = with_saved_options(config)
    if not config.report:
        check_texts(given if config.list else config)
    if config.list:
        for line in describe(make_plan(config)) if config.name else describe_all(config):
            print(line, flush=True)
        return RunsResult()
    if not config.name:
        raise ArgumentError("name", f"is missing: give an experiment, {', '.join(EXPERIMENTS)}.")
    result = RunsResult()
    plan = make_plan(config if config.report else with_device(config))
    if not config.report:
        for name, note in text_notes(plan).items():
            _say(f"{name} ({note})")
        if left := time_left(plan):
            _say(left)
        result = run_all(plan, _say)
    file, report, notes = write_report(plan)
    for note in [*notes, *(report["problems"] if config.report else ())]:
        _say(note)
    if report["missing"]:
        _say(f"{len(report['missing'])} runs are missing in the report.")
    print(f"report: {file}")
    return result


def check_texts(config: ReproduceConfig) -> None:
    """Raise LineartimeError for a text that is given and does not exist, or cannot be trained on."""
    for name in TEXT_OPTIONS:
        try:
            if given := getattr(config, name):
                corpus = load_corpus(given)
                if corpus.describe("train") is None:
                    raise missing_split(corpus, "train")
        except ArgumentError as error:
            raise ArgumentError(name, error.predicate) from None


def _say(line: str) -> None:
    print(line, file=SCREEN, flush=True)
