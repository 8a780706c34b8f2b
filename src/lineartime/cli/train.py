"""`lineartime train`: train a model, or resume a run."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lineartime.errors import LineartimeError
from lineartime.runs.metrics import METRICS_FILE
from lineartime.training.config import TrainConfig


@dataclass(frozen=True)
class Options(TrainConfig):
    """Train a model on text; leaves checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve in --out."""

    preset: Annotated[str, tyro.conf.arg(aliases=["--model"])] = TrainConfig.preset
    context_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = TrainConfig.context_length
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.data


def run(options: Options, arguments: Sequence[str]) -> None:
    """Train, then print the best checkpoint and draw the losses; the arguments are read again with a recipe's defaults."""
    from lineartime.training.distributed import is_main_process
    from lineartime.training.loop import train_completed
    from lineartime.training.resuming import complete

    def reparse(defaults: TrainConfig) -> TrainConfig:
        usual = Options(**{**vars(defaults), "data": ()})  # texts that are given replace the default ones
        options = tyro.cli(Options, prog="lineartime train", args=arguments, default=usual)
        return TrainConfig(**{**vars(options), "data": options.data or defaults.data})

    config, left_out = complete(TrainConfig(**vars(options)), reparse)
    run = config.run_directory
    metrics = run / METRICS_FILE
    before = _modified(metrics)
    try:
        result = train_completed(config, left_out)
        if is_main_process():
            if not result.finished:
                print(f"resume by: {_resume_command(run)}", file=sys.stderr)
            print(f"best checkpoint: {result.checkpoint}")
    finally:  # a run that ended early also has a curve to look at
        if is_main_process() and _modified(metrics) != before:
            _draw(run)


def _modified(file: Path) -> int:
    """When a file was last written; 0 if it does not exist."""
    return file.stat().st_mtime_ns if file.is_file() else 0


def _resume_command(run: Path) -> str:
    from lineartime.training.distributed import started_by_torchrun

    start = "lineartime"
    if started_by_torchrun():
        start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', os.environ['WORLD_SIZE'])} -m lineartime"
    return f"{start} train --resume --out {shlex.quote(str(run))}"


def _draw(run: Path) -> None:
    from lineartime.runs.curve import draw_curve

    try:
        print(f"loss curve: {draw_curve(run)}")
    except LineartimeError as error:
        print(f"no loss curve: {error}")
