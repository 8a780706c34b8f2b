"""One call of `reproduce`, from its options to its files, and the lines that list experiments and their runs."""

from collections.abc import Iterator
from dataclasses import replace

from lineartime.data import load_corpus, missing_split
from lineartime.errors import ArgumentError
from lineartime.experiments import catalogue
from lineartime.experiments.catalogue import Job, JobKind
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig
from lineartime.experiments.plan import Candidate, Plan, make_plan, with_device, with_saved_options
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import RunsResult, all_jobs, read_run, run_all
from lineartime.runs.record import texts_of
from lineartime.screen import SCREEN
from lineartime.units import duration

FAILED = "Some runs failed: they are named above and in the report."
NAMES: dict[JobKind, tuple[str, str]] = {
    "run": ("run", "runs"),
    "tune": ("trial", "trials"),
    "speed": ("measurement of speed", "measurements of speed"),
    "latency": ("measurement of latency", "measurements of latency"),
    "memory": ("run", "runs"),
}
"""What one job and more of a kind are called."""

Jobs = list[tuple[Candidate, Job]]


def reproduce(config: ReproduceConfig) -> RunsResult:
    """List experiments, or run the missing parts of one and write its report; what happens meanwhile goes to standard error.

    Raises LineartimeError for anything the user can fix; what has been done stays.
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
        return RunsResult()
    if not config.name:
        raise ArgumentError("name", f"is missing: give an experiment, {', '.join(catalogue.EXPERIMENTS)}.")
    result = RunsResult()
    plan = make_plan(config if config.report else with_device(config))
    if not config.report:
        for name, note in text_notes(plan).items():
            _say(f"{name} ({note})")
        if left := _left(list(all_jobs(plan))):
            _say(_counted(left))
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


def describe_all(config: ReproduceConfig) -> Iterator[str]:
    """A line for each experiment at a scale: its name and its runs."""
    for name, experiment in catalogue.EXPERIMENTS.items():
        if config.scale != "trial" and not experiment.settings[config.scale]:
            yield f"{name:20} {experiment.title}: not in the paper"
            continue
        jobs = list(all_jobs(make_plan(replace(config, name=name, systems=(), add=(), contexts=(), texts=()))))
        yield f"{name:20} {experiment.title}: {_counted(jobs)}"


def describe(plan: Plan) -> Iterator[str]:
    """Lines about one experiment: its settings and systems, their runs and steps or seconds, and what is left."""
    yield f"{plan.config.name}: {plan.experiment.title}"
    yield plan.experiment.question
    yield f"scale {plan.config.scale}: {plan.scale.description}"
    jobs, notes = list(all_jobs(plan)), text_notes(plan)
    width = max(len(each.arm.name) for each in plan.candidates)
    for setting in plan.settings:
        selected = plan.selected(setting)
        if selected:
            note = notes.pop(setting.text, "")  # once for each text
            yield f"{setting} ({note})" if note else f"{setting}"
        for each in selected:
            line = f"  {each.arm.name:{width}} {each.parameters / 1e6:7.2f} M"
            if plan.experiment.kind != "latency":
                own = _counted([(candidate, job) for candidate, job in jobs if candidate is each])
                line += f"  {own}  {' '.join([each.options['preset'], *each.options['override']])}"
            yield line
    left = _left(jobs)
    yield _counted(jobs)
    yield f"{len(jobs) - len(left)} of {len(jobs)} have ended; left: {_counted(left) or 'nothing'}"


def text_notes(plan: Plan) -> dict[str, str]:
    """For the name of each kind of text that the selected runs read, the text that they read, in words.

    Models whose speed is measured read no text.
    """
    notes: dict[str, str] = {}
    for setting in plan.settings if plan.experiment.kind != "latency" else ():
        for each in plan.selected(setting) if setting.reads_text else ():
            other = "" if getattr(plan.config, setting.text) else f"; the option {setting.text} gives another"
            notes[setting.text] = f"text: {', '.join(texts_of(each.options))}{other}"
    return notes


def _left(jobs: Jobs) -> Jobs:
    return [(each, job) for each, job in jobs if read_run(job).state in ("missing", "interrupted")]


def _counted(jobs: Jobs) -> str:
    """The number of jobs of each kind with their seconds of training or steps, and the sum of these seconds."""
    words = []
    for kind, (one, more) in NAMES.items():
        if found := [job for _, job in jobs if job.kind == kind]:
            words.append(f"{len(found)} {more if len(found) > 1 else one}{'' if kind == 'speed' else _each(found)}")
    seconds = sum(job.seconds or 0.0 for _, job in jobs)
    return ", ".join(words) + (f": {duration(seconds)} of training" if seconds else "")


def _each(jobs: list[Job]) -> str:
    """The seconds of training of jobs, or their steps and the tokens of a step, where they all have the same."""
    if seconds := sorted({round(job.seconds, 1) for job in jobs if job.seconds}):
        return f" of {' to '.join(f'{each:g}' for each in dict.fromkeys([seconds[0], seconds[-1]]))} s"
    steps = {(job.options["steps"], job.options["tokens_per_batch"]) for job in jobs if job.options.get("steps")}
    return "".join(f" of {count:,} steps of {tokens:,} tokens" for count, tokens in steps) if len(steps) == 1 else ""


def _say(line: str) -> None:
    print(line, file=SCREEN, flush=True)
