"""`lineartime train`: train a model, or resume a run."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lineartime.checkpoint import best_checkpoint, last_checkpoint, read_training_state
from lineartime.data import load_corpus
from lineartime.errors import LineartimeError
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import METRICS_FILE
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import is_main_process
from lineartime.training.loop import train
from lineartime.training.resuming import complete


@dataclass(frozen=True)
class Options(TrainConfig):
    """Train a model on text; leaves checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve in --out."""

    preset: Annotated[str, tyro.conf.arg(aliases=["--model"])] = TrainConfig.preset
    context_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = TrainConfig.context_length


def run(options: Options, arguments: Sequence[str]) -> None:
    """Train, then print the best checkpoint and draw the losses.

    Args:
        options: as read from the arguments.
        arguments: the options as written, which are read again with the defaults of a recipe or of another run.
    """

    def reparse(defaults: TrainConfig) -> TrainConfig:
        options = tyro.cli(Options, prog="lineartime train", args=arguments, default=Options(**vars(defaults)))
        return TrainConfig(**vars(options))

    config, left_out = complete(TrainConfig(**vars(options)), reparse)
    run = config.run_directory
    metrics = run / METRICS_FILE
    before = _modified(metrics)
    try:
        train(config, left_out)
        if is_main_process():
            if read_training_state(last_checkpoint(run)).step < config.steps:
                _say_how_to_resume(run)
            print(f"best checkpoint: {best_checkpoint(run)}")
    finally:  # a run that ended early also has a curve to look at
        if is_main_process() and _modified(metrics) != before:
            _draw(config)


def _modified(file: Path) -> int:
    """When a file was last written; 0 if it does not exist."""
    return file.stat().st_mtime_ns if file.is_file() else 0


def _say_how_to_resume(run: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    start = "lineartime"
    if processes > 1:
        start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', processes)} -m lineartime"
    print(f"Resume the run by {start} train --resume --out {shlex.quote(str(run))}", file=sys.stderr)


def _draw(config: TrainConfig) -> None:
    try:
        text = Path(config.data).name if config.data else load_corpus(None).name
        print(f"loss curve: {draw_curve(config.run_directory, f'{config.preset} on {text}')}")
    except LineartimeError as error:
        print(f"no loss curve: {error}")
