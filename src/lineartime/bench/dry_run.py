"""A dry run of training: what a run consists of, how long it will take, and how much memory it needs."""

import statistics
import time
from contextlib import closing
from functools import partial

import torch

from lineartime.bench.measure import timed
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.host import peak_memory
from lineartime.machine import using_threads
from lineartime.runs.metrics import NullReporter
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Stop, Trainer, memory_of_steps
from lineartime.training.parallel import read_environment
from lineartime.units import duration, size

STEPS = 3
"""The number of timed steps, after a first step that compiles and allocates memory."""


def dry_run(config: TrainConfig) -> list[str]:
    """Take a few steps of a new run, in one process, and return lines of what was found.

    Nothing is written to the folder of the run; the text is encoded into the cache, as in a real run. Raises LineartimeError
    as `train` does, and for options that need several processes.
    """
    if config.context_parallel > 1:
        raise ArgumentError("context_parallel", f"is {config.context_parallel}, but a dry run is one process: leave it out.")
    if (processes := read_environment().world_size) > 1:
        raise LineartimeError(f"torchrun started {processes} processes, but a dry run is one process: leave torchrun out.")
    with using_threads(config.threads):
        trainer = Trainer(config)
        config = trainer.config
        step = partial(trainer.take_step, NullReporter(), Stop())
        with closing(trainer.text.loader), memory_of_steps(trainer.device):
            step()
            step_seconds = statistics.median(timed(step, 1, time.perf_counter) for _ in range(STEPS))
            evaluation_seconds = timed(trainer.validation_loss, 1, time.perf_counter)
    seconds = config.steps * step_seconds + (1 + -(-config.steps // config.eval_every)) * evaluation_seconds
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    moments = sum(moment.nbytes for moment in trainer.optimizer.moments().values())
    # Of tensors on a GPU, otherwise of the whole process.
    peak = torch.cuda.max_memory_allocated(trainer.device) if trainer.device.type == "cuda" else peak_memory()
    return [
        *trainer.notes,
        f"a step        {step_seconds:.3g} s, {trainer.tokens_per_step / step_seconds:,.0f} tokens/s, the median of {STEPS}",
        f"an evaluation {evaluation_seconds:.3g} s",
        f"the run       {duration(seconds)}, without checkpoints",
        f"a checkpoint  {size(weights + moments)}, {size(weights)} of it weights",
        f"memory        {size(peak)} at most",
        "Nothing was saved.",
    ]
