"""`lineartime train`: train a model, or resume a run."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lineartime.training.config import TrainConfig


@dataclass(frozen=True)
class Options(TrainConfig):
    """Train a model on text; leaves checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve in --out."""

    preset: Annotated[str, tyro.conf.arg(aliases=["--model"])] = TrainConfig.preset
    context_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = TrainConfig.context_length
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.data


def run(options: Options, arguments: Sequence[str]) -> None:
    """Train, then print the best checkpoint; the arguments are read again with a recipe's defaults."""
    from lineartime.training.distributed import is_main_process
    from lineartime.training.loop import train_completed
    from lineartime.training.resuming import complete

    def reparse(defaults: TrainConfig) -> TrainConfig:
        usual = Options(**{**vars(defaults), "data": ()})  # texts that are given replace the default ones
        options = tyro.cli(Options, prog="lineartime train", args=arguments, default=usual)
        return TrainConfig(**{**vars(options), "data": options.data or defaults.data})

    result = train_completed(*complete(TrainConfig(**vars(options)), reparse))
    if is_main_process():
        if not result.finished:
            print(f"resume by: {_resume_command(result.run)}", file=sys.stderr)
        print(f"best checkpoint: {result.checkpoint}")


def _resume_command(run: Path) -> str:
    from lineartime.training.distributed import started_by_torchrun

    start = "lineartime"
    if started_by_torchrun():
        start = f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', os.environ['WORLD_SIZE'])} -m lineartime"
    return f"{start} train --resume --out {shlex.quote(str(run))}"
