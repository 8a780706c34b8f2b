"""How the processes of a run share the work of a step: who holds which weights, and when gradients are exchanged.

The loss of a step is the sum of all losses over the number of all targets, of every process and every micro-batch. Each
process differentiates its own sum times `size` / targets, of which the mean over the processes is the gradient of that loss:
so that the result does not depend on how a step is divided up. Only "local" clipping does, by its nature: there each replica
differentiates its own mean.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lineartime.data import Batch
from lineartime.models.heads import LanguageModel
from lineartime.ops.layout import ContextGroup
from lineartime.ops.mixed_chunk.context_parallel import context_group
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World


class Objective(nn.Module):
    """The sum of a model's losses as a module's forward pass, which is where PyTorch's engines take hold."""

    def __init__(self, model: LanguageModel, context: ContextGroup | None) -> None:
        super().__init__()
        self.model = model
        self._context = context

    def forward(self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """A scalar, in nats."""
        return self.model.total_loss(inputs, targets, cu_seqlens=cu_seqlens, context=self._context)


class Parallel:
    """One process, which shares nothing."""

    local: ClassVar[bool] = False
    """Whether each replica has the gradient of its own mean loss until it is clipped."""

    def __init__(self, objective: Objective) -> None:
        self.objective: nn.Module = objective
        self.parameters = list(objective.parameters())

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: in the last one of a step gradients may be exchanged."""
        yield

    def clip(self, limit: float) -> float:
        """Bring the gradients of all processes together, shortened to norm `limit`; the norm they had before."""
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class LocallyClipped(Parallel):
    """Every replica shortens its own gradient before the mean is taken: the paper's "local" clipping."""

    local = True

    def __init__(self, objective: Objective, world: World) -> None:
        super().__init__(objective)
        self._world = world

    def clip(self, limit: float) -> float:
        """Shorten this replica's gradient, then take the mean over all; the norm is that of this replica."""
        world = self._world
        if world.context_group is not None:  # a replica is all the processes that share its sequences
            self._average(world.context_group, world.context_parallel)
        norm = super().clip(limit)
        self._average(None, world.size)
        return norm

    def _average(self, group: dist.ProcessGroup | None, size: int) -> None:
        gradients = []
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
        waiting = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
        for work in waiting:
            work.wait()
        torch._foreach_div_(gradients, float(size))


class Replicated(Parallel):
    """Every process holds all weights; gradients are averaged while the backward pass goes on (DistributedDataParallel)."""

    def __init__(self, objective: Objective, world: World) -> None:
        super().__init__(objective)
        device = self.parameters[0].device
        self._engine = DistributedDataParallel(objective, device_ids=[device.index] if device.type == "cuda" else None)
        self.objective = self._engine

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged in the backward pass of the last micro-batch."""
        if last:
            yield
        else:
            with self._engine.no_sync():
                yield


class Sharded(Parallel):
    """Every process holds a part of each block's weights, gradients and moments (FSDP2)."""

    def __init__(self, objective: Objective, world: World, bf16: bool) -> None:
        device = next(objective.parameters()).device
        mesh = init_device_mesh(device.type, (world.size,))
        # Inputs stay as they are: the residual stream and the rotations of a layout are float32, as with other engines.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
            cast_forward_inputs=False,
        )
        for block in objective.model.backbone.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(objective, mesh=mesh, mp_policy=policy)
        super().__init__(objective)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Gradients are exchanged, and each process keeps its part, in the backward pass of the last micro-batch."""
        assert isinstance(self.objective, FSDPModule)
        self.objective.set_requires_gradient_sync(last)
        self.objective.set_is_last_backward(last)
        yield


def parallelize(model: LanguageModel, config: TrainConfig, world: World) -> Parallel:
    """A model as the run's processes share it, each of which brings the same weights."""
    objective = Objective(model, None if world.context_group is None else context_group(world.context_group))
    if world.size == 1:
        return Parallel(objective)
    if config.parallel == "fsdp":
        return Sharded(objective, world, bf16=config.precision == "bf16")
    return LocallyClipped(objective, world) if config.clips_locally else Replicated(objective, world)


def part_of(batch: Batch, world: World, device: torch.device) -> Batch:
    """The part of its sequences that this process reads, on its device."""
    inputs, targets, cu_seqlens = batch
    if world.context_parallel > 1:
        length = inputs.shape[1] // world.context_parallel
        part = slice(world.context_rank * length, (world.context_rank + 1) * length)
        inputs, targets = inputs[:, part], targets[:, part]
    return Batch(inputs.to(device), targets.to(device), None if cu_seqlens is None else cu_seqlens.to(device))
