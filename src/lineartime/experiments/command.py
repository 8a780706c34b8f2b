"""One call of `reproduce`, from its options to its files."""

from lineartime.data import load_corpus, missing_split
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.plan import Plan, make_plan, with_device, with_saved_options
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import run_all, say
from lineartime.runs.record import texts_of


def reproduce(config: ReproduceConfig) -> None:
    """Run the missing parts of an experiment and write its report; what happens meanwhile goes to standard error.

    Raises:
        LineartimeError: for anything the user can fix, and at the end if runs failed; what has been done stays.
        KeyboardInterrupt: after an interrupt, when the report is written; the same call goes on.
    """
    config.check()
    config = with_saved_options(config)
    if not config.report:
        check_texts(config)
    plan = make_plan(config if config.report else with_device(config))
    problems: list[str] = []
    interrupted = False
    try:
        if not config.report:
            for note in text_notes(plan):
                say(note)
            problems = run_all(plan)
    except KeyboardInterrupt:
        interrupted = True
    file, report = write_report(plan)
    if report["missing"]:
        say(f"{len(report['missing'])} runs are missing in the report.")
    print(f"report: {file}")
    if interrupted:
        raise KeyboardInterrupt
    if problems:
        raise LineartimeError("Some runs failed: they are named above and in the report.")


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


def text_notes(plan: Plan) -> list[str]:
    """A line for each kind of text that the selected runs read."""
    read = {setting.text: each[0].options for setting, each in plan.selected.items() if each and not setting.task}
    return [f"text of {text}: {', '.join(texts_of(options))}" for text, options in read.items()]
