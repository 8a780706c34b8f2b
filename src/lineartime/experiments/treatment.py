"""The section of a report that says how all systems were treated alike, with every trial of a learning rate."""

from collections.abc import Iterator, Mapping
from typing import Any

from lineartime.experiments import catalogue
from lineartime.experiments.definitions import MAX_TRIAL_RATIO, MIN_TRIAL_STEPS
from lineartime.experiments.plan import Plan
from lineartime.experiments.report_data import Report, settings_with_results, within_tolerance
from lineartime.experiments.tables import rate_tables, trial_steps

PAPER_TREATMENT = (
    "The paper's configuration, the same for all systems: its texts, tokens in a step, steps and learning rate, which is not "
    "tuned here. All runs of a setting read the same text in the same order."
)


def equal_treatment(plan: Plan, report: Report) -> Iterator[str]:
    """The paragraphs and tables of the section."""
    yield "## Equal treatment"
    yield _paragraph(plan, report) if plan.tunes else PAPER_TREATMENT
    if plan.tunes:
        yield from rate_tables(plan, report)


def _paragraph(plan: Plan, report: Report) -> str:
    chosen = "the rate of each optimiser" if plan.experiment.each_optimizer else "rate and optimiser"
    config, scale = plan.config, plan.scale
    compiled = "compiled" if config.compile == "on" else "not compiled"
    return "\n".join(
        [
            "- **Data.** All runs of a setting and a seed read the same windows of the same text in the same order.",
            f"- **Batches.** {scale.tokens_per_batch:,} tokens in a step; a longer context is a step of one sequence.",
            f"- **Optimisers.** The same for all: {', '.join(config.optimizers)}, each with a warm-up of a tenth of the steps, "
            f"a linear fall to zero, and the same weight decay and clipping.{_adamw_ratio(plan)}",
            f"- **Learning rates.** Each system's is tuned over the same grid, {config.tuning:g} s of training each. "
            f"{_trials(plan, report)}The loss on held-out text chooses {chosen}. The tables below show every trial.",
            f"- **Time.** Each run trains for {config.budget:g} s, without evaluations and compilation ({compiled}). A "
            "schedule must know its length, so the steps are the speed of a system (*tokens/s*) times the budget. Speeds are "
            f"measured before anything else, by {scale.speed_rounds} runs of {scale.speed_steps} steps for each system and "
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
    ratios = {catalogue.OPTIMIZERS[name].options.get("adamw_ratio") for name in plan.config.optimizers} - {None}
    return "".join(f" With Muon, AdamW trains embeddings and vectors at {ratio:g} times its rate." for ratio in ratios)


def _scores(plan: Plan) -> str:
    """The options of gated units that other presets or publications choose otherwise."""

    def of(options: Mapping[str, Any]) -> str:
        return ", ".join(str(options[each]) for each in ("normalization", "initial_scores") if each in options)

    gated = {
        each.arm.name: dict.fromkeys(of(mixer.options) for mixer in each.model.mixers if "normalization" in mixer.options)
        for each in plan.contenders
    }
    said = [f"{name} {' and '.join(options)}" for name, options in gated.items() if options]
    return f"*normalization* and *initial_scores* of the gated systems: {'; '.join(said)}. " if said else ""


def _trials(plan: Plan, report: Report) -> str:
    """Sentences about trials that were prolonged, and about those that are too short to choose by."""
    rows = [(setting["name"], row) for setting in settings_with_results(report) for row in setting["rows"]]
    said = ""
    if any(row.get("trial_steps") for _, row in rows):
        said = (
            f"Where that is less than {MIN_TRIAL_STEPS} steps, a trial lasts until it has them, "
            f"but at most {MAX_TRIAL_RATIO} times as long. "
        )
    steps = {f"{row['name']} ({name})": trial_steps(plan, row, row["optimizer"]) for name, row in rows if row["optimizer"]}
    short = [f"{name}: {count}" for name, count in steps.items() if count is not None and count < MIN_TRIAL_STEPS]
    if short and plan.config.scale != "trial":
        said += f"**Fewer than {MIN_TRIAL_STEPS} steps may choose a rate by chance**: {', '.join(short)}. "
    return said


def parameters_apart(report: Report) -> str:
    """A sentence about how far the numbers of parameters are apart, of systems that have a run."""
    of_settings = [
        [row for row in setting["rows"] if "runs" not in row or any(run["state"] != "missing" for run in row["runs"])]
        for setting in report["settings"]
    ]
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
