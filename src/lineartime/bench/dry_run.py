"""A dry run of training: what a run consists of, how long it will take, and how much memory it needs."""

import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from lineartime.bench.measure import timed
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.host import peak_memory
from lineartime.machine import using_threads
from lineartime.runs.reporter import NullReporter
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import read_environment
from lineartime.training.loop import Stop, memory_of_steps, prepare
from lineartime.training.resuming import check_folder

STEPS = 3
"""The number of timed steps, after a first step that compiles and allocates memory."""


@dataclass(frozen=True)
class DryRun:
    """The findings of a dry run."""

    notes: list[str]  # the messages that the run would print at its start
    step_seconds: float  # of one step, the median of a few
    step_tokens: int  # in one step
    evaluation_seconds: float  # seconds of one evaluation
    seconds: float  # seconds of all steps and evaluations
    weights: int  # bytes of the weights in a checkpoint
    moments: int  # bytes of the optimiser's moments
    peak: int  # peak memory in bytes: of tensors on a GPU, otherwise of the whole process


def dry_run(config: TrainConfig) -> DryRun:
    """Take a few steps of a new run, in one process.

    Nothing is written to the folder of the run; the text is encoded into the cache, as in a real run. Raises LineartimeError
    as `train` does, and for options that need several processes.
    """
    if config.context_parallel > 1:
        raise ArgumentError("context_parallel", f"is {config.context_parallel}, but a dry run is one process: leave it out.")
    if (processes := read_environment().world_size) > 1:
        raise LineartimeError(f"torchrun started {processes} processes, but a dry run is one process: leave torchrun out.")
    check_folder(config)
    with using_threads(config.threads):
        trainer = prepare(config)
        config, setup = trainer.config, trainer.setup
        step = partial(trainer.take_step, NullReporter(), Stop())
        with closing(trainer.text.loader), memory_of_steps(setup.device):
            step()
            step_seconds = statistics.median(timed(step, 1, time.perf_counter) for _ in range(STEPS))
            evaluation_seconds = timed(trainer.validation.loss, 1, time.perf_counter)
    evaluations = 1 + -(-config.steps // config.eval_every)  # including one before the first step
    cuda = setup.device.type == "cuda"
    return DryRun(
        trainer.notes,
        step_seconds,
        setup.tokens_per_step,
        evaluation_seconds,
        config.steps * step_seconds + evaluations * evaluation_seconds,
        weights=sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters()),
        moments=sum(moment.numel() * moment.element_size() for moment in trainer.optimizer.moments().values()),
        peak=torch.cuda.max_memory_allocated(setup.device) if cuda else peak_memory(),
    )
