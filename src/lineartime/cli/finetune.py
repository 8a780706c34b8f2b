"""`lineartime finetune`: teach a trained model a task."""

from lineartime.errors import require_packages
from lineartime.finetuning.config import FinetuneConfig as FinetuneOptions
from lineartime.screen import new_table, output_console


def run(options: FinetuneOptions) -> None:
    """Fine-tune, and print the metrics of each rate."""
    needed = ("datasets", "transformers", "accelerate", "peft", "scipy", "sklearn")
    require_packages(*needed, extra="finetune", purpose="Fine-tuning")
    from lineartime.finetuning.tune import MODEL, finetune

    result = finetune(options)
    headers = [header.replace("_", " ") for header in ("rate", *result.trials[result.best or 0].metrics, "epoch")]
    table = new_table(headers, folded=headers)
    for place, trial in enumerate(result.trials):
        values = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in trial.metrics.values()]
        style = "bold" if place == result.best else ""
        values = values or ["diverged", *[""] * (len(headers) - 3)]
        table.add_row(f"{trial.learning_rate:g}", *values, f"{trial.epoch:g}", style=style)
    output_console().print(table)
    print(f"the best model: {options.out / MODEL}")
