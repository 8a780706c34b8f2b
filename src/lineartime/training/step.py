"""The gradient of a step, over all its micro-batches and processes."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lineartime.data import Batch
from lineartime.host import freed_memory_kept
from lineartime.machine import autocast
from lineartime.ops.cross_entropy import IGNORED
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World
from lineartime.training.parallel import Parallel, part_of


@dataclass(frozen=True)
class Gradient:
    """The numbers of a step after its backward passes; the gradient itself is in the parameters.

    Attributes:
        loss: the sum of this process's losses, in nats.
        targets: the number of targets, over all processes.
        norm: the norm of the gradient before clipping; if groups are clipped separately, the mean over this process's groups.
    """

    loss: float
    targets: float
    norm: float


class Targets(NamedTuple):
    """How many targets each micro-batch of this process has, and all of them in all processes."""

    own: list[int]
    total: float


def memory_of_steps(device: torch.device) -> AbstractContextManager[None]:
    """A context in which steps on a CPU keep the memory that they free."""
    return freed_memory_kept() if device.type == "cpu" else nullcontext()


def count_targets(batches: Sequence[Batch], failure: Exception | None, world: World) -> Targets:
    """Count the targets of a step. If one process could not read its micro-batches, all raise its `failure` here."""
    own = [int((batch.targets != IGNORED).sum()) for batch in batches]
    # Processes that share a sequence have the same batches.
    total, failed = world.sum(sum(own) / world.context_parallel, failure is not None)
    if failed:
        with world.raise_on_all_ranks():
            if failure is not None:
                raise failure
    return Targets(own, total)


def compute_gradient(
    parallel: Parallel,
    batches: Sequence[Batch],
    targets: Targets,
    step: int,
    config: TrainConfig,
    world: World,
    device: torch.device,
) -> Gradient:
    """Run the forward and backward passes of a step and clip the gradient. All processes must call this together."""
    # The seed of dropout is derived from the step, so that checkpoints need not store a state.
    seed = np.random.SeedSequence((config.seed, step, world.rank)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    torch.manual_seed(int(seed))
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    size = len(batches) // parallel.groups
    for start in range(0, len(batches), size):
        weight = parallel.loss_weight(sum(targets.own[start : start + size]), max(1.0, targets.total))
        for index in range(start, start + size):
            with parallel.accumulate(last=index == len(batches) - 1):
                with autocast(device, config.precision == "bf16"):
                    loss = parallel.objective(*part_of(batches[index], world, device))
                (loss * weight).backward()
            losses.append(loss.detach())
        norms.append(parallel.clip(config.clip_norm or math.inf))
    parallel.finish()
    # Copy to the host once, at the end: a copy waits for the device, which then idles until the next pass is queued.
    numbers = torch.stack([x.to(losses[0].dtype) for x in (*losses, *norms)]).tolist()
    return Gradient(sum(numbers[: len(losses)]), targets.total, sum(numbers[len(losses) :]) / len(norms))
