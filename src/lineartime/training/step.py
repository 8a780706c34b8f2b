"""The gradient of a step, over all its micro-batches and processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lineartime.data import Batch
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


def compute_gradient(
    parallel: Parallel, batches: Sequence[Batch], step: int, config: TrainConfig, world: World, device: torch.device
) -> Gradient:
    """Run the forward and backward passes of a step and clip the gradient. All processes must call this together."""
    own_targets = [int((batch.targets != IGNORED).sum()) for batch in batches]
    [targets] = world.sum(sum(own_targets) / world.context_parallel)  # processes that share a sequence have the same batches
    targets = max(1.0, targets)
    # The seed of dropout is derived from the step, so that checkpoints need not store a state.
    seed = np.random.SeedSequence((config.seed, step, world.rank)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    torch.manual_seed(int(seed))
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    size = len(batches) // parallel.groups
    for start in range(0, len(batches), size):
        weight = parallel.loss_weight(sum(own_targets[start : start + size]), targets)
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
    return Gradient(sum(numbers[: len(losses)]), targets, sum(numbers[len(losses) :]) / len(norms))
