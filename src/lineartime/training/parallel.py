"""How the processes of a run share the work of a step: which weights each holds, and when gradients are exchanged.

The loss of a step is the sum of all losses divided by the number of targets, over all processes and micro-batches. Each process
differentiates its own sum times `size` / targets. The mean of these gradients over the processes is the gradient of that loss,
so the result does not depend on how a step is divided. If gradients are clipped before they are averaged, each group of
micro-batches differentiates its own mean loss. Local clipping makes each replica a group, so it depends on their number.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lineartime.data import Batch
from lineartime.errors import ArgumentError
from lineartime.models.language_model import LanguageModel
from lineartime.ops.context import context_group
from lineartime.ops.make_batch import to_device
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World


class Objective(nn.Module):
    """A module whose forward pass is the sum of a model's losses, to be wrapped by DDP and FSDP.

    Raises ArgumentError for a `group` of processes that share each sequence, and a model other than FLASH.
    """

    def __init__(self, model: LanguageModel, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.model = model
        self._context = None if group is None else context_group(group)
        if group is not None and not model.splits_context:
            mixer = next(block.mixer.title for block in model.backbone.blocks if not block.mixer.splits_context)
            raise ArgumentError("context_parallel", f"needs a model of FLASH, but {mixer} reads each sequence in one process.")

    def forward(
        self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, prefix_lengths: Tensor | None = None
    ) -> Tensor:
        """The sum of the losses: a scalar, in nats."""
        return self.model.total_loss(inputs, targets, None, cu_seqlens, prefix_lengths, context=self._context)


class Parallel:
    """A single process, which exchanges nothing."""

    groups = 1
    """The number of equal, consecutive groups of this process's micro-batches whose gradients are clipped separately."""

    def __init__(self, objective: Objective, world: World) -> None:
        self.objective: nn.Module = objective
        self.parameters = list(objective.parameters())
        self._world = world

    def loss_weight(self, own_targets: int, targets: float) -> float:
        """The factor of a summed loss in the backward pass, from the targets of this process's group and of the whole step."""
        return self._world.size / targets

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Enclose the forward and backward passes of a micro-batch. Gradients may be exchanged in the last one of a step."""
        yield

    def clip(self, limit: float) -> Tensor:
        """Clip the complete gradient of a group to the norm `limit`; return its norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def finish(self) -> None:
        """After all groups are clipped, store the mean gradient of all groups and processes in the parameters."""


class GroupClipped(Parallel):
    """Clips the gradient of every group of micro-batches before the gradients are averaged."""

    def __init__(self, objective: Objective, world: World, groups: int) -> None:
        super().__init__(objective, world)
        self.groups = groups
        self._total: list[Tensor] = []

    def loss_weight(self, own_targets: int, targets: float) -> float:
        """As for a single process, but the gradient is that of the group's own mean loss until it is clipped."""
        return self._world.context_parallel / max(1, own_targets)

    def clip(self, limit: float) -> Tensor:
        """Clip the gradient of a group and add it to those of earlier groups; return its norm before clipping."""
        world = self._world
        if world.context_group is not None:  # the processes that share sequences clip together
            self._average(self._gradients(), world.context_group, world.context_parallel)
        norm = super().clip(limit)
        if self._total:
            torch._foreach_add_(self._total, self._gradients())
        else:
            self._total = self._gradients()
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def finish(self) -> None:
        """Average over all groups of all processes."""
        self._average(self._total, None, self._world.size, self.groups)
        for parameter, gradient in zip(self.parameters, self._total, strict=True):
            parameter.grad = gradient
        self._total = []

    def _gradients(self) -> list[Tensor]:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _average(self, gradients: list[Tensor], group: dist.ProcessGroup | None, size: int, groups: int = 1) -> None:
        waiting = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients] if size > 1 else []
        for work in waiting:
            work.wait()
        torch._foreach_div_(gradients, float(size * groups))


class Replicated(Parallel):
    """Every process holds all weights; gradients are averaged during the backward pass (DistributedDataParallel)."""

    def __init__(self, objective: Objective, world: World, compiled: bool) -> None:
        super().__init__(objective, world)
        if compiled:
            # Blocks are compiled one by one, so gradients are exchanged during the backward pass. By default, the compiler
            # would also split each block where DDP begins another bucket of gradients.
            torch._dynamo.config.optimize_ddp = False
        self._engine = DistributedDataParallel(objective)  # without device_ids, boundaries of documents stay on the CPU
        self.objective = self._engine

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Exchange gradients in the backward pass of the last micro-batch only."""
        with nullcontext() if last else self._engine.no_sync():
            yield


class Sharded(Parallel):
    """Every process holds a part of each block's weights, gradients and moments (FSDP2)."""

    def __init__(self, objective: Objective, world: World, bf16: bool) -> None:
        device = next(objective.parameters()).device
        mesh = init_device_mesh(device.type, (world.size,))
        # Inputs are not cast: in bf16, the rotations of a layout would lose precision at large positions. Neither are the
        # weights outside the blocks: the residual stream has the dtype of the embedding.
        outside = MixedPrecisionPolicy(reduce_dtype=torch.float32 if bf16 else None, cast_forward_inputs=False)
        inside = replace(outside, param_dtype=torch.bfloat16) if bf16 else outside
        for block in objective.model.backbone.blocks:
            fully_shard(block, mesh=mesh, mp_policy=inside)
        fully_shard(objective, mesh=mesh, mp_policy=outside)
        super().__init__(objective, world)

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """Exchange gradients in the backward pass of the last micro-batch only; each process keeps its part."""
        assert isinstance(self.objective, FSDPModule)
        self.objective.set_requires_gradient_sync(last)
        self.objective.set_is_last_backward(last)
        yield


def parallelize(objective: Objective, config: TrainConfig, world: World) -> Parallel:
    """Divide the work on an objective over the run's processes, which must all start with the same weights."""
    if config.clips_locally:
        rows = config.rows(world.data_rank, world.data_ranks)
        return GroupClipped(objective, world, rows.groups // world.data_ranks)
    if world.size == 1:
        return Parallel(objective, world)
    if config.parallel == "fsdp":
        return Sharded(objective, world, bf16=config.precision == "bf16")
    return Replicated(objective, world, compiled=config.compile == "on")


def part_of(batch: Batch, world: World, device: torch.device) -> Batch:
    """The part of a batch's sequences that this process reads, on its device.

    The boundaries of documents stay on the CPU: the layout of a batch is made from them there, and need not wait for a GPU.
    """
    if world.context_parallel > 1:
        length = batch.inputs.shape[1] // world.context_parallel
        part = slice(world.context_rank * length, (world.context_rank + 1) * length)
        batch = batch._replace(inputs=batch.inputs[:, part], targets=batch.targets[:, part])
    prefix_lengths = None if batch.prefix_lengths is None else to_device(batch.prefix_lengths, device)
    return Batch(to_device(batch.inputs, device), to_device(batch.targets, device), batch.cu_seqlens, prefix_lengths)
