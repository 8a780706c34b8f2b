"""The explanations and captions of a report."""

from lineartime.experiments.plan import Plan

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
            "- Of two or three seeds, all values are shown; of more, the mean ± the standard deviation, and their number.",
            f"- Losses per {per} are on text that was not trained on: *held-out* text, on which the curves and the tuned rates "
            "are measured, and the *test* split, measured once at the end.",
            f"- *loss against the baseline*: the held-out loss over that of {base}, less one; for the paper, the same of the "
            "logarithms of its perplexities. It compares across tokenizers and sizes better than losses do. "
            "Like the speed-up, it is over the seeds that both have.",
            f"- *speed-up*, as the paper defines it: the time in which {base} reaches its final quality, over the time in "
            "which this system reaches it; of the same seed, and of training alone. A learning rate is scheduled for the whole "
            "run, so a shorter run could reach that quality sooner.",
        ]
    )
