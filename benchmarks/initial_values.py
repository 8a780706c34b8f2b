"""What other initial values of linear maps do, and how AdamW goes on: `python benchmarks/initial_values.py TEXT --runs FOLDER`.

The models and options are those of `lineartime reproduce lm --scale cpu` on Wikipedia at 512 tokens, in fp32 on one core, from
the same seed. All differ in the optimiser, its rate, the initial values or the steps alone, which fix what is learnt, so that
other programs may run meanwhile. A run that is complete is not trained again. On one core of a Xeon, an hour.
"""

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from measure import save

from lineartime.evaluation import evaluate
from lineartime.layers.dense import Dense
from lineartime.markdown import markdown_table
from lineartime.runs.metrics import read_metrics
from lineartime.training.config import OptimizerName
from lineartime.training.loop import train

PUBLISHED, FAN_IN = "0.02", "1/sqrt(fan-in)"
OPTIONS: dict[str, Any] = {
    "tokenizer": "bpe-4096",
    "context_length": 512,
    "batch_size": 8,
    "tokens_per_batch": 4096,
    "precision": "fp32",
    "threads": 1,
    "compile": "off",
    "seed": 0,
}
WIDTHS = {"transformer++": 264}
"""The widths with which the models have equally many parameters; None is that of the preset."""
FULL = 300
"""Runs of more steps are measured on the test split, too."""
TEST_TOKENS = 262_144


class Arm(NamedTuple):
    """A run: the system, the optimiser and its rate, the standard deviation of linear maps at the start, and the steps."""

    system: str
    optimizer: OptimizerName
    rate: float
    values: str
    steps: int

    @property
    def folder(self) -> str:
        """The name of its run."""
        return f"{self.system}-{self.optimizer}-{self.rate}-{'fan-in' if self.values == FAN_IN else 'published'}-{self.steps}"


ARMS = (
    Arm("transformer++", "adamw", 0.0015, PUBLISHED, 60),
    Arm("transformer++", "adamw", 0.0015, FAN_IN, 60),
    Arm("transformer++", "adamw", 0.0015, PUBLISHED, 240),
    Arm("transformer++", "adamw", 0.003, PUBLISHED, 240),
    *(Arm("transformer++", "muon", rate, PUBLISHED, 60) for rate in (0.006, 0.012)),
    *(Arm("transformer++", "muon", rate, FAN_IN, 60) for rate in (0.006, 0.012, 0.024)),
    *(Arm("flash", "muon", rate, PUBLISHED, 60) for rate in (0.006, 0.012)),
    *(Arm("flash", "muon", rate, FAN_IN, 60) for rate in (0.006, 0.012, 0.024)),
    *(Arm("flash", "muon", 0.012, values, 386) for values in (PUBLISHED, FAN_IN)),
    *(Arm("flash-next", "muon", rate, PUBLISHED, 60) for rate in (0.006, 0.012)),
    *(Arm("flash-next", "muon", rate, FAN_IN, 60) for rate in (0.006, 0.012, 0.024)),
    Arm("flash-next", "muon", 0.006, PUBLISHED, 376),
    *(Arm("flash-next", "muon", rate, FAN_IN, 376) for rate in (0.006, 0.012)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", help="text of Wikipedia, as for --data")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    rows = [measured(arm, options.text, options.runs / arm.folder) for arm in ARMS]
    table = [
        [row["system"], row["optimizer"], str(row["rate"]), row["values"], str(row["steps"]), *map(shown, row["losses"])]
        for row in rows
    ]
    header = ["system", "optimiser", "rate", "initial values", "steps", "after 60", "at the end", "test bits per byte"]
    save("initial_values", rows, markdown_table(header, table, left=4))


def shown(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def measured(arm: Arm, text: str, run: Path) -> dict[str, Any]:
    """Train an arm, unless that is done: its held-out losses in nats per token by step, and the test loss of a long run."""
    losses = held_out(run)
    if arm.steps not in losses:
        with mock.patch.object(Dense, "reset_parameters", by_fan_in) if arm.values == FAN_IN else nullcontext():
            train(**OPTIONS, **options_of(arm), data=text, out=run, resume=bool(losses))
        losses = held_out(run)
    test = evaluate(run, max_tokens=TEST_TOKENS, checkpoint="last", precision="fp32") if arm.steps > FULL else None
    columns = [losses.get(60) if arm.steps > 60 else None, losses[arm.steps], None if test is None else test.bits_per_byte]
    return {**arm._asdict(), "losses": columns, "curve": losses}


def options_of(arm: Arm) -> dict[str, Any]:
    """The options of training of an arm. With Muon, AdamW has twice its rate, as in the recipe `quick`."""
    width = WIDTHS.get(arm.system)
    return {
        "preset": f"{arm.system}-tiny",
        "override": {} if width is None else {"d_model": width},
        "optimizer": arm.optimizer,
        "adamw_ratio": 2.0 if arm.optimizer == "muon" else 1.0,
        "learning_rate": arm.rate,
        "steps": arm.steps,
        "eval_every": max(30, arm.steps // 8),
    }


def held_out(run: Path) -> dict[int, float]:
    """The held-out losses of a run by step; empty if it has not begun."""
    if not (run / "metrics.jsonl").exists():
        return {}
    return {int(line["step"]): line["validation_loss"] for line in read_metrics(run) if "validation_loss" in line}


def by_fan_in(layer: Dense) -> None:
    """In place of `Dense.reset_parameters`: weights from N(0, 1/sqrt(in_features))."""
    torch.nn.Linear.reset_parameters(layer)  # keeps the order of random numbers
    torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    torch.nn.init.zeros_(layer.bias)


if __name__ == "__main__":
    main()
