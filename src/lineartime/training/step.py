"""One step of the optimiser: AdamW, its learning rate, and the gradient of all micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from lineartime.data import Batch
from lineartime.machine import autocast
from lineartime.models.matrices import matrices_of
from lineartime.ops.cross_entropy import IGNORED
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World
from lineartime.training.parallel import Parallel, part_of

COSINE_FLOOR = 0.1
"""Where a cosine schedule ends, as a share of the peak learning rate."""


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays only the matrices of a model."""
    matrices = {id(parameter) for parameter in matrices_of(model)}
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if id(p) in matrices], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=all(p.device.type != "mps" for p in parameters),  # whose fused kernels are untested
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0: a linear warm-up over W of S steps to the peak P, then the schedule.

    With x = (step - W) / (S - W), from 0 after the warm-up to 1 just after the last step,

        linear: P (1 - x)
        cosine: F + (P - F) (1 + cos(pi x)) / 2, where the floor F is P / 10
    """
    warmup = config.steps // 10 if config.warmup_steps is None else config.warmup_steps
    peak = config.learning_rate
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "linear":
        return peak * (config.steps - step) / max(1, config.steps - warmup)
    floor = COSINE_FLOOR * peak
    return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / max(1, config.steps - warmup))) / 2


@dataclass(frozen=True)
class Gradient:
    """What this process knows after the backward passes of a step; the gradient itself is in the parameters.

    Attributes:
        loss: the sum of this process's losses, in nats.
        targets: the number of targets, over all processes.
        norm: of the gradient before clipping; where groups are clipped by themselves, the mean over its own.
    """

    loss: float
    targets: float
    norm: float


def compute_gradient(
    parallel: Parallel, batches: Sequence[Batch], step: int, config: TrainConfig, world: World, device: torch.device
) -> Gradient:
    """Run the forward and backward passes of a step's micro-batches and clip the gradient; all processes call together."""
    own_targets = [int((batch.targets != IGNORED).sum()) for batch in batches]
    [targets] = world.sum(sum(own_targets) / world.context_parallel)  # processes that share a sequence have the same batches
    targets = max(1.0, targets)
    # The seed of dropout is derived from the step, so that checkpoints need not store a state.
    seed = np.random.SeedSequence((config.seed, step, world.rank)).generate_state(1, np.uint64)[0] >> np.uint64(1)
    torch.manual_seed(int(seed))
    total, norms, size = 0.0, [], len(batches) // parallel.groups
    for start in range(0, len(batches), size):
        weight = parallel.loss_weight(sum(own_targets[start : start + size]), targets)
        for index in range(start, start + size):
            with parallel.accumulate(last=index == len(batches) - 1):
                with autocast(device, config.precision == "bf16"):
                    loss = parallel.objective(*part_of(batches[index], world, device))
                (loss * weight).backward()
            total += float(loss.detach())
        norms.append(parallel.clip(config.clip_norm or math.inf))
    parallel.finish()
    return Gradient(total, targets, sum(norms) / len(norms))
