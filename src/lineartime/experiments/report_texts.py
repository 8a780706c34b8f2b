"""The paragraphs of a report: how its numbers were made, and what they mean."""

from lineartime.experiments.plan import Plan

PAPER_TREATMENT = (
    "The paper's configuration, the same for all systems: its texts, tokens in a step, steps and learning rate, which is not "
    "tuned here. All runs of a setting read the same text in the same order."
)
LATENCY = (
    "All systems take turns in each measurement, with the same tokens in a step. A step is forward and backward, without the "
    "optimiser. The paper's times are of whole steps on other machines, so only their ratios compare."
)
OTHER_CHUNKS = (
    "With other chunks than in training, the relative bias keeps the distances that both sizes have, and is zero for those "
    "that training did not see. Beyond 512 tokens it has another form, which cannot be made from it: those cells are empty."
)
APPROXIMATION = (
    "The difference of the test losses, seed by seed, after the same time of training; the paper's after the same steps."
)
CURVES = (
    "Loss on held-out text by the time of training, without evaluations and compilation, at the speed that was measured alone. "
    "Dotted: the final quality of {base}, "
    "which the speed-up refers to. Thin lines are further seeds."
)


def legend(plan: Plan) -> str:
    """What the columns of the tables of quality mean."""
    base = plan.experiment.baseline
    per = "masked token" if plan.experiment.task == "mlm" else "byte"
    return "\n".join(
        [
            "- Of several seeds, all values are shown.",
            f"- Losses per {per} are on text that was not trained on: *held-out* text, on which the curves and the tuned rates "
            "are measured, and the *test* split, measured once at the end.",
            f"- *loss against the baseline*: the held-out loss over that of {base}, less one; for the paper, the same of the "
            "logarithms of its perplexities. It compares across tokenizers and sizes better than losses do.",
            f"- *speed-up*, as the paper defines it: the time in which {base} reaches its final quality, over the time in "
            "which this system reaches it; of the same seed, and of training alone. A learning rate is scheduled for the whole "
            "run, so a shorter run could reach that quality sooner.",
        ]
    )


def equal_treatment(plan: Plan, parameters: str) -> str:
    """How all systems were treated alike; `parameters` says how far these are apart."""
    compiled = "compiled" if plan.compile == "on" else "not compiled"
    return "\n".join(
        [
            "- **Data.** All runs of a setting and a seed read the same windows of the same text in the same order.",
            f"- **Batches.** {plan.scale.tokens_per_batch:,} tokens in a step; a longer context is a step of one sequence.",
            f"- **Optimisers.** The same for all: {', '.join(plan.optimizers)}, each with a warm-up of a tenth of the steps, a "
            "linear fall to zero, and the same weight decay and clipping.",
            f"- **Learning rates.** Each system's is tuned over the same grid, {plan.tuning:g} s of training each. The loss on "
            "held-out text chooses rate and optimiser. The tables below show every trial.",
            f"- **Time.** Each run trains for {plan.budget:g} s, without evaluations and compilation ({compiled}). A schedule "
            "must know its length, so the steps are the speed of a system (*tokens/s*) times the budget. Speeds are measured "
            f"before anything else, by {plan.scale.speed_rounds} runs of {plan.scale.speed_steps} steps for each system and "
            "optimiser, in turn; the median counts. A system that a later call added was measured in that call. *training (s)* "
            "and the curves are at this speed: what else the machine does later changes nothing.",
            f"- **Parameters.** {parameters}",
            "- **Not equalised.** Each system has the initialisation, the norm and the other options of its published form.",
        ]
    )
