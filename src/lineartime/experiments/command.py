"""One call of `reproduce`, from its options to its files, and the lines that list experiments and their runs."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lineartime.data import load_corpus, missing_split
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.experiments import catalogue
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.plan import Job, Plan, make_plan, with_device, with_saved_options
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import all_jobs, read_run, run_all
from lineartime.runs.record import texts_of
from lineartime.screen import SCREEN
from lineartime.units import duration

NAMES = {"speed": "speed measurement", "tune": "trial", "run": "run"}
"""What the jobs of a kind are called."""


def reproduce(config: ReproduceConfig) -> None:
    """List experiments, or run the missing parts of one and write its report; what happens meanwhile goes to standard error.

    Raises:
        LineartimeError: for anything the user can fix, and at the end if runs failed; what has been done stays.
        KeyboardInterrupt: after an interrupt, when the report is written; the same call goes on.
    """
    config.check()
    given = config
    if config.name:
        config = with_saved_options(config)
    if not config.report:
        check_texts(given if config.list else config)
    if config.list:
        for line in describe(make_plan(config)) if config.name else describe_all(config):
            print(line, flush=True)
        return
    if not config.name:
        raise ArgumentError("name", f"is missing: give an experiment, {', '.join(catalogue.EXPERIMENTS)}.")
    plan = make_plan(config if config.report else with_device(config))
    problems: list[str] = []
    interrupted = False
    try:
        if not config.report:
            for note in text_notes(plan):
                _say(note)
            problems = run_all(plan, _say)
    except KeyboardInterrupt:
        interrupted = True
    file, report = write_report(plan)
    if report["missing"]:
        _say(f"{len(report['missing'])} runs are missing in the report.")
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


def describe_all(config: ReproduceConfig) -> Iterator[str]:
    """A line for each experiment at a scale: its name and its runs."""
    for name, experiment in catalogue.EXPERIMENTS.items():
        plan = make_plan(ReproduceConfig(name, config.scale, config.out))
        yield f"{name:15} {experiment.question} {_counted(plan, list(all_jobs(plan)))}"


def describe(plan: Plan) -> Iterator[str]:
    """Lines about one experiment: its texts, its settings and systems, their runs and steps or seconds, and what is left."""
    yield f"{plan.config.name}: {plan.experiment.question}"
    yield f"scale {plan.config.scale}: {plan.scale.description}"
    yield from text_notes(plan)
    jobs = list(all_jobs(plan))
    width = max(len(each.arm.name) for candidates in plan.candidates.values() for each in candidates)
    for setting, candidates in plan.selected.items():
        yield f"{setting}"
        for each in candidates:
            own = _counted(plan, [job for job in jobs if job.folder.parent == each.folder])
            line = f"  {each.arm.name:{width}} {each.parameters / 1e6:7.2f} M  {own}"
            yield f"{line}  {' '.join([each.options['preset'], *each.options['override']])}"
    left = [job for job in jobs if read_run(job.folder).state in ("missing", "interrupted")]
    yield _counted(plan, jobs)
    yield f"{len(jobs) - len(left)} of {len(jobs)} have ended; left: {_counted(plan, left) or 'nothing'}"


def text_notes(plan: Plan) -> list[str]:
    """A line for each kind of text that the selected runs read."""
    read = {setting.text: each[0].options for setting, each in plan.selected.items() if each and not setting.task}
    return [f"text of {text}: {', '.join(texts_of(options))}" for text, options in read.items()]


def _counted(plan: Plan, jobs: Sequence[Job]) -> str:
    """The number of jobs of each kind, with the steps that are given, and the sum of the seconds of training."""
    kinds = Counter(job.kind for job in jobs)
    words = [f"{number} {NAMES[kind]}{'s' if number > 1 else ''}" for kind, number in kinds.items()]
    seconds = kinds["tune"] * (plan.config.tuning or 0) + kinds["run"] * (plan.config.budget or 0)
    given = {(job.options["steps"], job.options["tokens_per_batch"]) for job in jobs if job.options.get("steps")}
    if seconds:
        return f"{', '.join(words)}: {duration(seconds)} of training"
    return ", ".join(words) + "".join(f" of {steps:,} steps of {tokens:,} tokens" for steps, tokens in given)


def _say(line: str) -> None:
    print(line, file=SCREEN, flush=True)
