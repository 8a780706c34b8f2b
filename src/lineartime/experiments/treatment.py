"""The section of a report that says how all systems were treated alike, with every trial of a learning rate."""

from collections.abc import Iterable, Iterator
from typing import Any

from lineartime.experiments import catalogue
from lineartime.experiments.collect import within_tolerance
from lineartime.experiments.definitions import MAX_TRIAL_RATIO, MIN_TRIAL_STEPS
from lineartime.experiments.plan import Plan
from lineartime.experiments.report_data import AnyRow, QualityReport, Report, SystemRow
from lineartime.experiments.tables import NOT_THERE, settings_with_results, table

PAPER_TREATMENT = (
    "The paper's configuration, the same for all systems: its texts, tokens in a step, steps and learning rate, which is not "
    "tuned here. All runs of a setting read the same text in the same order."
)


def equal_treatment(plan: Plan, report: QualityReport) -> Iterator[str]:
    """The paragraphs and tables of the section."""
    yield "## Equal treatment"
    if not plan.tunes:
        yield PAPER_TREATMENT
        return
    yield _paragraph(plan, report)
    for setting in settings_with_results(report):
        for optimizer in plan.optimizers:
            rows = _by_arm(setting["rows"], optimizer)
            if not rows:
                continue
            columns: dict[str, list[str]] = {"system": [row["arm"] for row in rows]}
            columns["steps"] = [f"{_trial_steps(plan, row, optimizer) or NOT_THERE}" for row in rows]
            for rate in rows[0]["grid"][optimizer]:
                columns[rate] = [_tried(row, optimizer, rate) for row in rows]
            what = "nats per token on held-out text; bold: the choice; \\*: the best of an optimiser, at an end of the grid"
            yield f"Rates tried with {optimizer}: {setting['name']} ({what})"
            yield table(columns)


def _by_arm(rows: Iterable[SystemRow], optimizer: str) -> list[SystemRow]:
    """A row for each arm that was tuned with an optimiser: the one that was trained with it, if there are several."""
    tuned = [row for row in rows if row["grid"].get(optimizer)]
    first = sorted(tuned, key=lambda row: row["optimizer"] == optimizer)  # stable; later ones replace earlier ones
    chosen = {row["arm"]: row for row in first}
    return [chosen[arm] for arm in dict.fromkeys(row["arm"] for row in tuned)]


def _paragraph(plan: Plan, report: QualityReport) -> str:
    chosen = "the rate of each optimiser" if plan.experiment.each_optimizer else "rate and optimiser"
    compiled = "compiled" if plan.compile == "on" else "not compiled"
    return "\n".join(
        [
            "- **Data.** All runs of a setting and a seed read the same windows of the same text in the same order.",
            f"- **Batches.** {plan.scale.tokens_per_batch:,} tokens in a step; a longer context is a step of one sequence.",
            f"- **Optimisers.** The same for all: {', '.join(plan.optimizers)}, each with a warm-up of a tenth of the steps, a "
            f"linear fall to zero, and the same weight decay and clipping.{_adamw_ratio(plan)}",
            f"- **Learning rates.** Each system's is tuned over the same grid, {plan.tuning:g} s of training each. "
            f"{_trials(plan, report)}The loss on held-out text chooses {chosen}. The tables below show every trial.",
            f"- **Time.** Each run trains for {plan.budget:g} s, without evaluations and compilation ({compiled}). A schedule "
            "must know its length, so the steps are the speed of a system (*tokens/s*) times the budget. Speeds are measured "
            f"before anything else, by {plan.scale.speed_rounds} runs of {plan.scale.speed_steps} steps for each system and "
            "optimiser, in turn; the median counts. A system that a later call added was measured in that call. *training (s)* "
            "and the curves are at this speed: what else the machine does later changes nothing.",
            f"- **Parameters.** {parameters_apart(report)}",
            "- **Not equalised.** Each system has the initialisation, the norm and the other options of its preset. "
            f"{_scores(plan)}"
            "On a CPU with a C++ compiler, gated units and mhsa-relu2 compute parts of their tiles in functions in C++; "
            "other systems are PyTorch's operations alone, with fused softmax attention.",
        ]
    )


def _adamw_ratio(plan: Plan) -> str:
    """A sentence about the second rate of Muon."""
    ratios = {catalogue.OPTIMIZERS[name].options.get("adamw_ratio") for name in plan.optimizers} - {None}
    return "".join(f" With Muon, AdamW trains embeddings and vectors at {ratio:g} times its rate." for ratio in ratios)


def _scores(plan: Plan) -> str:
    """The options of gated units that other presets or publications choose otherwise."""
    gated = {
        entry.arm.name: entry.model.mixer.options for entry in plan.entries if "normalization" in entry.model.mixer.options
    }
    said = [
        f"{name} {', '.join(str(options[each]) for each in ('normalization', 'initial_scores') if each in options)}"
        for name, options in gated.items()
    ]
    return f"*normalization* and *initial_scores* of the gated systems: {'; '.join(said)}. " if said else ""


def _tried(row: SystemRow, optimizer: str, rate: str) -> str:
    grid = row["grid"][optimizer]
    cell = grid[rate]
    if not isinstance(cell, float):
        return str(cell)
    chosen = row["optimizer"] == optimizer and row["rate"] is not None and f"{row['rate']:g}" == rate
    best = cell == min(each for each in grid.values() if isinstance(each, float))
    at_end = best and len(grid) > 1 and rate in (min(grid, key=float), max(grid, key=float))
    return (f"**{cell:.4f}**" if chosen else f"{cell:.4f}") + ("\\*" if at_end else "")


def _trials(plan: Plan, report: QualityReport) -> str:
    """Sentences about trials that were prolonged, and about those that are too short to choose by."""
    rows = [(setting["name"], row) for setting in settings_with_results(report) for row in setting["rows"]]
    said = ""
    if any(row.get("trial_steps") for _, row in rows):
        said = (
            f"Where that is less than {MIN_TRIAL_STEPS} steps, a trial lasts until it has them, "
            f"but at most {MAX_TRIAL_RATIO} times as long. "
        )
    steps = {f"{row['name']} ({name})": _trial_steps(plan, row, row["optimizer"]) for name, row in rows if row["optimizer"]}
    short = [f"{name}: {count}" for name, count in steps.items() if count is not None and count < MIN_TRIAL_STEPS]
    if short and plan.config.scale != "trial":
        said += f"**Fewer than {MIN_TRIAL_STEPS} steps may choose a rate by chance**: {', '.join(short)}. "
    return said


def _trial_steps(plan: Plan, row: SystemRow, optimizer: str) -> int | None:
    """The steps of a trial; those of older reports, which do not hold them, from the speed that was measured."""
    if "trial_steps" in row:
        found: int | None = row["trial_steps"].get(optimizer)
        return found
    if row["optimizer"] != optimizer or not row["tokens_per_second"] or plan.tuning is None:
        return None
    steps: int = round(plan.tuning * row["tokens_per_second"] / plan.scale.tokens_per_batch)
    return steps


def _has_run(row: Any) -> bool:
    """Whether a row has a run. Rows of latency have none, and are measured together."""
    return "runs" not in row or any(run["state"] != "missing" for run in row["runs"])


def parameters_apart(report: Report) -> str:
    """A sentence about how far the numbers of parameters are apart."""
    of_settings: list[list[AnyRow]] = [[row for row in setting["rows"] if _has_run(row)] for setting in report["settings"]]
    rows = [row for of_setting in of_settings for row in of_setting]
    far = sorted({f"{row['name']} ({row['parameters_over_first']:+.2%})" for row in rows if not within_tolerance(row)})
    if not far:
        largest = max((abs(row["parameters_over_first"]) for row in rows), default=0.0)
        counts = [[row["parameters"] for row in of_setting] for of_setting in of_settings]
        apart = max((max(each) / min(each) - 1 for each in counts if each), default=0.0)
        return (
            f"Checked: all are within 3 % of the first system's (the largest difference is {largest:.1%}). "
            f"Any two of a setting differ by at most {apart:.1%}."
        )
    why = "as published" if report["scale"] == "paper" else "because a width is a whole number of features for each head"
    return f"**Not within 3 %** of the first system's, {why}: {', '.join(far)}."
