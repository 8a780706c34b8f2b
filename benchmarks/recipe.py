"""What each part of the recipe `quick` adds: `python benchmarks/recipe.py` (several hours on 2 cores; resumes).

Every variant is the recipe with one thing changed, or the paper's model and optimiser with one thing added. The recipe here
has a token shift, as `flash-next` had when the study began: "no token shift" is the recipe `quick` of today. All see as many
tokens as the recipe, but AdamW a quarter more: its steps are cheaper by that. The mean of weights is that of the checkpoints
of the last fifth of a run. A second table is the rate by width, of the recipe of today. Finished runs are not repeated, and
rows of runs that are not in the folder any more stay in the results; `--only NAME ...` runs some of them, and `--report`
none.
"""

import argparse
import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import RESULTS, evaluate_in_memory, save

from lineartime.checkpoint import list_checkpoints, load, load_tokenizer
from lineartime.data import Batch
from lineartime.data.prefetch import PrefetchedLoader
from lineartime.evaluation import Evaluation, evaluate
from lineartime.markdown import markdown_table
from lineartime.models.language_model import CausalLM
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.training.recipes import recipe_config
from lineartime.training.schedule import learning_rate, warmup_steps

SEEDS = (0, 1)
SHIFT = "token_shift=True"
QUICK = replace(recipe_config("quick"), override=(SHIFT,))
ADAMW: dict[str, Any] = {"optimizer": "adamw", "adamw_ratio": 1.0, "steps": QUICK.steps * 5 // 4}
GROWING = "batch of 2, then 4, then 8"
"""A third of the tokens with each; the rate falls with the tokens that are read."""
VARIANTS: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "bytes": {"tokenizer": "bytes"},
    "2,048 pieces": {"tokenizer": "bpe-2048"},
    "AdamW at 1.5e-3": {**ADAMW, "learning_rate": 1.5e-3},
    "AdamW at 3e-3": {**ADAMW, "learning_rate": 3e-3},
    "AdamW at 6e-3": {**ADAMW, "learning_rate": 6e-3},
    "no token shift": {"override": ()},
    "divisor count": {"override": (SHIFT, "normalization=count")},
    "small scores at first": {"override": (SHIFT, "initial_scores=small")},
    "flash-tiny": {"preset": "flash-tiny", "override": ()},
    "flash-tiny, AdamW at 3e-3": {**ADAMW, "preset": "flash-tiny", "override": (), "learning_rate": 3e-3},
    "half the rates": {"learning_rate": QUICK.learning_rate / 2},
    "twice the rates": {"learning_rate": QUICK.learning_rate * 2},
    "AdamW's part at the same rate": {"adamw_ratio": 1.0},
    "warm-up of 2%": {"warmup_steps": QUICK.steps // 50},
    "warm-up of 30%": {"warmup_steps": QUICK.steps * 3 // 10},
    "half the batch, twice the steps": {"batch_size": 2, "steps": QUICK.steps * 2},
    "a fifth more steps": {"steps": QUICK.steps * 6 // 5},
    "twice the batch, half the steps": {"batch_size": 8, "steps": QUICK.steps // 2},
    "cosine schedule": {"schedule": "cosine"},
    "constant rate": {},
    "constant rate, to zero over the last fifth": {},
    "context of 1,024": {"context_length": 1024, "batch_size": 2},
    GROWING: {"batch_size": 2, "steps": sum(QUICK.steps * 4 // (3 * batch) for batch in (2, 4, 8))},
}


def constant(step: int, config: TrainConfig) -> float:
    """The rate after the warm-up stays."""
    return learning_rate(step, config) if step < warmup_steps(config) else config.learning_rate


def to_zero_at_last(step: int, config: TrainConfig) -> float:
    """The rate after the warm-up stays, and falls to zero over the last fifth."""
    return constant(step, config) * min(1.0, 5 * (1 - step / config.steps))


def growth(step: int, config: TrainConfig) -> tuple[int, float]:
    """Of a growing batch: by how much it has grown at a step, and the share of all tokens that was read before."""
    third = config.steps * 4 / 7  # of the steps: 4/7 with the first batch, 2/7 with the second, 1/7 with the third
    if step < third:
        return 1, step / third / 3
    if step < 1.5 * third:
        return 2, (1 + 2 * (step / third - 1)) / 3
    return 4, (2 + 4 * (step / third - 1.5)) / 3


def by_tokens(step: int, config: TrainConfig) -> float:
    """A warm-up over a tenth of the tokens, then a linear fall to zero."""
    read = growth(step, config)[1]
    return config.learning_rate * min(10 * read + 1 / config.steps, (1 - read) / 0.9)


def growing(config: TrainConfig) -> Any:
    """Let each step read as many batches as `growth` says."""
    steps, next_step = itertools.count(), PrefetchedLoader.next_step

    def grown(loader: PrefetchedLoader) -> list[Batch]:
        return [batch for _ in range(growth(next(steps), config)[0]) for batch in next_step(loader)]

    return mock.patch.object(PrefetchedLoader, "next_step", grown)


SCHEDULES: dict[str, Callable[[int, TrainConfig], float]] = {
    "constant rate": constant,
    "constant rate, to zero over the last fifth": to_zero_at_last,
    GROWING: by_tokens,
}
"""Of the variants whose schedule is no option of training."""
MEANS = {name: f"{name}, mean of weights" for name in ("the recipe", "constant rate")}
"""The variants whose checkpoints of the last fifth are also measured as one model, with the mean of their weights."""
MEAN_OF = 6
WIDTHS, RATES, WIDTH_STEPS = (128, 256, 384), (2.5e-3, 5e-3, 1e-2), 200


def measure(name: str, config: TrainConfig, out: Path) -> list[dict[str, Any]]:
    """Train and measure on the test split, and the mean of weights if that is asked for; a finished run is read."""
    file = out / "measured.json"
    if not file.exists():
        every = config.steps if name not in MEANS else config.steps // (5 * MEAN_OF)
        windows = config.eval_windows if name not in MEANS else 4
        ways: dict[str, Any] = {
            "eval_every": every,
            "keep_every": every,
            "eval_windows": windows,
            "compile": "off",
            "track": (),
        }
        if name == GROWING:
            shutil.rmtree(out, ignore_errors=True)  # its position in the text is not that of its steps, so it cannot resume
        with (
            mock.patch("lineartime.training.loop.learning_rate", SCHEDULES.get(name, learning_rate)),
            growing(config) if name == GROWING else nullcontext(),
        ):
            train(replace(config, out=out, resume=bool(list_checkpoints(out)), **ways))
        options = {key: value for key, value in asdict(config).items() if value != getattr(TrainConfig, key, None)}
        measured = losses(evaluate(out, checkpoint="last", precision="fp32"))
        found = [{"variant": name, "seed": config.seed, **measured, "options": options}]
        if name in MEANS:
            found.append({**found[0], "variant": MEANS[name], **losses(evaluate_mean(out, config))})
            for checkpoint in list_checkpoints(out)[:-1]:
                shutil.rmtree(checkpoint)
        file.write_text(json.dumps(found, default=str))
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    for row in rows:
        if name != GROWING:  # whose metrics count the tokens of its first batch
            row["seconds"] = training_seconds(out)
        print(f"{row['variant']}, seed {config.seed}: {row['bits_per_byte']:.3f}", flush=True)
    return rows


def training_seconds(out: Path) -> float:
    """Seconds of training at the speed of the faster steps, which nothing else on the machine has slowed down."""
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    speeds = [step["tokens_per_second"] for step in steps if "tokens_per_second" in step]
    tokens: int = steps[-1]["tokens"]
    fast: float = statistics.quantiles(speeds, n=4)[-1]
    return tokens / fast


def losses(evaluation: Evaluation) -> dict[str, Any]:
    """Bits per byte, and by how many bits a token the loss falls from the first tokens of a context to later ones."""
    by_position = {position.first: position.loss for position in evaluation.by_position}
    return {"bits_per_byte": evaluation.bits_per_byte, "fall": (by_position[8] - by_position[256]) / math.log(2)}


def evaluate_mean(out: Path, config: TrainConfig) -> Evaluation:
    """The test loss of a model with the mean of the weights of the last checkpoints."""
    kept = list_checkpoints(out)[-MEAN_OF:]
    models = [load(checkpoint) for checkpoint in kept]
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            parameters[0].copy_(torch.stack(parameters).mean(0))
    assert isinstance(models[0], CausalLM)
    return evaluate_in_memory(models[0], load_tokenizer(out), config.context_length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/recipe"))
    parser.add_argument("--only", nargs="*", default=[], help="variants to run, of all")
    parser.add_argument("--report", action="store_true", help="measure nothing: make the tables of what is there")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    plan = [(name, replace(QUICK, **changes, seed=seed)) for seed in SEEDS for name, changes in VARIANTS.items()]
    by_width = {
        f"width {width} at {rate:g}": replace(QUICK, override=(f"d_model={width}",), learning_rate=rate, steps=WIDTH_STEPS)
        for width in WIDTHS
        for rate in RATES
    }
    plan += by_width.items()
    rows = []
    for name, config in plan:
        out = options.out / re.sub(r"\W+", "-", f"{name} seed {config.seed}")
        wanted = not options.report and (not options.only or name in options.only)
        if wanted or (out / "measured.json").exists():
            rows += measure(name, replace(config, threads=options.threads), out)
    rows += kept_rows(rows)
    save("recipe", rows, "\n".join(filter(None, (pieces_table(rows), width_table(rows)))))


def kept_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recorded rows of other runs than those of `rows`."""
    measured = {(row["variant"], row["seed"]) for row in rows}
    recorded: list[dict[str, Any]] = json.loads((RESULTS / "recipe.json").read_text())["rows"]
    return [row for row in recorded if (row["variant"], row["seed"]) not in measured]


def pieces_table(rows: list[dict[str, Any]]) -> str:
    """Each variant with both seeds, and what it differs from the recipe by."""
    names = [shown for name in VARIANTS for shown in (name, MEANS.get(name)) if shown]
    found = {name: [row for row in rows if row["variant"] == name] for name in names}
    of_recipe = statistics.fmean(row["bits_per_byte"] for row in found["the recipe"])
    lines = []
    for name, seeds in found.items():
        if seeds:
            values = [row["bits_per_byte"] for row in sorted(seeds, key=lambda row: row["seed"])]
            each = ", ".join(f"{value:.3f}" for value in values)
            fall = statistics.fmean(row["fall"] for row in seeds)
            times = [row["seconds"] for row in seeds if "seconds" in row]
            seconds = f"{min(times):.0f}" if times else "-"
            lines.append([name, each, f"{statistics.fmean(values) - of_recipe:+.3f}", f"{fall:.2f}", seconds])
    header = ["recipe `quick` with", "test bits per byte, each seed", "difference", "fall with context, bits a token"]
    return markdown_table([*header, "seconds of training"], lines)


def width_table(rows: list[dict[str, Any]]) -> str:
    """Bits per byte by width and rate; nothing if none was measured."""
    found = {row["variant"]: f"{row['bits_per_byte']:.3f}" for row in rows if row["variant"].startswith("width")}
    if not found:
        return ""
    lines = [[f"{width}", *(found.get(f"width {width} at {rate:g}", "-") for rate in RATES)] for width in WIDTHS]
    return markdown_table([f"d_model, {WIDTH_STEPS} steps", *(f"rate {rate:g}" for rate in RATES)], lines)


if __name__ == "__main__":
    main()
