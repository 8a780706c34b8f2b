"""`lineartime finetune`: teach a trained model a task."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich import box
from rich.table import Column, Table

from lineartime.errors import require_packages
from lineartime.finetuning.config import Advanced, FinetuneConfig
from lineartime.screen import output_console


@dataclass(frozen=True)
class FinetuneOptions(FinetuneConfig):
    """The options of `lineartime finetune`."""

    run: tyro.conf.Positional[Path]
    advanced: Annotated[Advanced, tyro.conf.OmitArgPrefixes] = field(default_factory=Advanced)

    def __post_init__(self) -> None:
        """Leave the checks to `FinetuneConfig`: tyro would show its errors as those of the parser."""


def run(options: FinetuneOptions) -> None:
    """Fine-tune, and print the metrics of each rate."""
    needed = ("datasets", "transformers", "accelerate", "peft", "scipy", "sklearn")
    require_packages(*needed, extra="finetune", purpose="Fine-tuning")
    config = FinetuneConfig(**vars(options))
    from lineartime.finetuning.tune import MODEL, finetune

    result = finetune(config)
    headers = ("rate", *result.trials[result.best or 0].metrics, "epoch")
    right = [Column(header.replace("_", " "), justify="right") for header in headers]
    table = Table(*right, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, trial in enumerate(result.trials):
        values = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in trial.metrics.values()]
        style = "bold" if place == result.best else ""
        values = values or ["diverged", *[""] * (len(headers) - 3)]
        table.add_row(f"{trial.learning_rate:g}", *values, f"{trial.epoch:g}", style=style)
    output_console().print(table)
    print(f"the best model: {options.out / MODEL}")
