"""The processes of a run: how they meet, what they exchange, which weights each holds, and how they share the work of a step.

torchrun starts the processes and describes the place of each in environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).
Without torchrun, a run is a single process, which exchanges nothing. If one process fails, torchrun ends the others.

The loss of a step is the sum of all losses divided by the number of targets, over all processes and micro-batches. Each process
differentiates its own sum times `size` / targets. The mean of these gradients over the processes is the gradient of that loss,
so the result does not depend on how a step is divided. If gradients are clipped before they are averaged, each group of
micro-batches differentiates its own mean loss. Local clipping makes each replica a group, so it depends on their number.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lineartime.data import Batch
from lineartime.errors import ArgumentError, LineartimeError, first_line
from lineartime.machine import autocast
from lineartime.models.language_model import LanguageModel
from lineartime.ops.context import context_group
from lineartime.ops.cross_entropy import IGNORED
from lineartime.ops.packing import to_device
from lineartime.training.config import TrainConfig

Result = TypeVar("Result")


class Environment(NamedTuple):
    """The place of this process among those that torchrun started; a group is the processes of a machine."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    group_rank: int = 0
    group_world_size: int = 1
    torchelastic_restart_count: int = 0


def read_environment() -> Environment:
    """Read the variables; a single process has ranks of 0, whatever is set. Raises LineartimeError for an invalid variable."""
    names = {name: name.upper() for name in Environment._fields}
    try:
        found = {name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ}
        if found.get("world_size", 1) <= 1:
            return Environment(torchelastic_restart_count=found.get("torchelastic_restart_count", 0))
        if not 0 <= found["rank"] < found["world_size"]:
            raise ValueError(f"RANK is {found['rank']}")
        return Environment(**{"local_world_size": found["world_size"], **found})
    except (KeyError, ValueError) as error:
        what = f"The environment is not that of several processes ({type(error).__name__}: {error})"
        raise LineartimeError(f"{what}: start the processes with torchrun, which sets {', '.join(names.values())}.") from None


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of the run; numbers count from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    context_parallel: int = 1  # the number of processes that share each sequence; they are neighbours in rank
    context_group: dist.ProcessGroup | None = None  # those that share this one's sequences; None if it reads them alone
    store: dist.Store | None = field(default=None, repr=False)  # the key-value store of all processes; None if it is alone

    @property
    def is_main(self) -> bool:
        """Whether this process shows progress, records metrics and writes checkpoints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The index of the data share that this process reads, out of `data_ranks`."""
        return self.rank // self.context_parallel

    @property
    def data_ranks(self) -> int:
        """The number of shares of the data."""
        return self.size // self.context_parallel

    def sum(self, *values: float) -> list[float]:
        """Sum each of these numbers over all processes."""
        totals = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.size > 1:
            dist.all_reduce(totals)
        return list(map(float, totals))

    def gather(self, value: Result) -> list[Result]:
        """Gather the values of all processes, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def share(self, make: Callable[[], Result]) -> Result:
        """Make a value in the main process and return it in all processes."""
        value: Result = self.gather(make() if self.is_main else None)[0]  # type: ignore[assignment]
        return value

    def local_main_first(self, name: str, make: Callable[[], Result]) -> Result:
        """Call `make` first in one process of each machine, then in the others, which find the files that it wrote.

        The first call may take hours, so the others wait on the store, where no collective timeout applies. When this returns,
        the first calls have finished on all machines. Raises LineartimeError if that of another machine has failed.
        """
        if self.store is None:
            return make()
        environment = read_environment()
        if self.local_rank == 0:
            made = "failed"
            try:
                result = make()
                made = "made"
            finally:
                self.store.set(f"first/{name}/{environment.group_rank}", made)
        for other in range(environment.group_world_size):
            self.store.wait([f"first/{name}/{other}"], timedelta(days=30))
            if self.store.get(f"first/{name}/{other}") != b"made":
                raise LineartimeError(f"The first process of machine {other} could not prepare {name}: see its output.")
        return result if self.local_rank == 0 else make()


_RUNS = itertools.count()
"""Counts the runs of this process, as all others do."""


@contextmanager
def join_world(device: torch.device, *, timeout: float, context_parallel: int = 1) -> Iterator[World]:
    """Connect to the other processes that torchrun started, for the duration of a `with` block.

    Raises LineartimeError if `context_parallel` does not divide their number, or if one does not start or is lost: after
    `timeout` seconds, at the start and in every exchange.
    """
    environment = read_environment()
    rank, size = environment.rank, environment.world_size
    if size % context_parallel:
        start = "start as many with torchrun" if size == 1 else f"use a divisor of {size}"
        found = f"is {context_parallel}, which does not divide the number of processes, {size}: {start}."
        raise ArgumentError("context_parallel", found)
    if size == 1:
        yield World()
        return
    if device.type == "mps":
        raise ArgumentError("device", "is mps, which supports only one process, but torchrun has started several: use cpu.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Processes from before a restart, and earlier runs of these processes, used other prefixes.
    prefix = f"lineartime/{environment.torchelastic_restart_count}/{next(_RUNS)}"
    store = dist.PrefixStore(prefix, _meet(rank, size, timeout))
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
        try:
            context_group = None
            if context_parallel > 1:
                context_group, _ = dist.new_subgroups(group_size=context_parallel, timeout=timedelta(seconds=timeout))
            yield World(rank, size, environment.local_rank, context_parallel, context_group, store)
        finally:
            # DDP frees its process group while holding the GIL, and joins the threads of gloo, which need it to free tensors.
            time.sleep(0.01)
            dist.destroy_process_group()
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
            raise
        raise LineartimeError(
            f"A process of the run was lost, or exchanged nothing for {timeout:g} s (timeout): its own output, or that of "
            "torchrun, says why; then resume the run from its last checkpoint with `resume=True`."
        ) from None


@cache  # it serves all runs of this process
def _meet(rank: int, size: int, timeout: float) -> dist.Store:
    """The key-value store of all processes. Process 0 serves it, or torchrun, which outlives all of them."""
    try:
        store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout)))[0]
    except (ValueError, RuntimeError) as error:  # the environment does not say where, or a process is not there
        found, why = f"Process {rank} of {size} did not find the others", first_line(error).rstrip(".")
        advice = "start all of them with torchrun; the output of the one that is missing says why."
        raise LineartimeError(f"{found} within {timeout:g} s (timeout; {why}): {advice}") from None
    return store


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
        return self.model.total_loss(
            inputs, targets, cu_seqlens=cu_seqlens, prefix_lengths=prefix_lengths, context=self._context
        )


class Parallel:
    """How the processes divide the work on an objective: who holds which weights, and when gradients are averaged and clipped.

    All processes must start with the same weights. `objective` is what computes losses. With "ddp", every process holds all
    weights, and gradients are averaged during the backward pass; with "fsdp", every process holds a part of each block's
    weights, gradients and moments (FSDP2). With local clipping, this process's micro-batches are equal, consecutive groups,
    whose gradients are clipped separately and then averaged.
    """

    def __init__(self, objective: Objective, config: TrainConfig, world: World) -> None:
        self._world = world
        self._bf16 = config.precision == "bf16"
        self._limit = config.clip_norm or float("inf")
        self._locally = config.clips_locally
        self._groups = config.rows(world.data_rank, world.data_ranks).groups // world.data_ranks if self._locally else 1
        self.objective: nn.Module = objective
        if world.size > 1 and not self._locally:
            if config.parallel == "fsdp":
                shard(objective, world, self._bf16)
            else:
                if config.compile == "on":
                    # Blocks are compiled one by one, so gradients are exchanged during the backward pass. By default, the
                    # compiler would also split each block where DDP begins another bucket of gradients.
                    torch._dynamo.config.optimize_ddp = False
                self.objective = DistributedDataParallel(objective)  # no device_ids: boundaries of documents stay on the CPU
        self._parameters = list(objective.parameters())

    def gradient(self, batches: Sequence[Batch]) -> tuple[list[Tensor], list[Tensor], float]:
        """Run both passes of a step, and leave its clipped gradient in the parameters.

        Return the summed losses of this process's micro-batches, in nats; the norms of its groups' gradients before clipping;
        and the number of targets of all processes.
        """
        world, device, total = self._world, self._parameters[0].device, list[Tensor]()
        own_targets = [int((batch.targets != IGNORED).sum()) for batch in batches]
        # Processes that share a sequence have the same batches.
        [targets] = world.sum(sum(own_targets) / world.context_parallel)
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        size = len(batches) // self._groups
        for first in range(0, len(batches), size):
            weight = world.size / max(1.0, targets)
            if self._locally:  # until it is clipped, the gradient is that of the group's own mean loss
                weight = world.context_parallel / max(1, sum(own_targets[first : first + size]))
            for index in range(first, first + size):
                with self._accumulate(last=index == len(batches) - 1):
                    with autocast(device, self._bf16):
                        loss = self.objective(*part_of(batches[index], world, device))
                    (loss * weight).backward()
                losses.append(loss.detach())
            if self._locally and world.context_group is not None:  # the processes that share sequences clip together
                _average(self._gradients(), world.context_group, world.context_parallel)
            norm = nn.utils.clip_grad_norm_(self._parameters, self._limit)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            if self._locally:
                clipped = self._gradients()
                if total:
                    torch._foreach_add_(total, clipped)
                else:
                    total = clipped
                for parameter in self._parameters:
                    parameter.grad = None
        if self._locally:
            _average(total, None, world.size, self._groups)
            for parameter, gradient in zip(self._parameters, total, strict=True):
                parameter.grad = gradient
        return losses, norms, targets

    @contextmanager
    def _accumulate(self, last: bool) -> Iterator[None]:
        """Enclose the forward and backward passes of a micro-batch. Gradients are exchanged in the last one of a step."""
        if isinstance(self.objective, FSDPModule):
            self.objective.set_requires_gradient_sync(last)
            self.objective.set_is_last_backward(last)
        if isinstance(self.objective, DistributedDataParallel) and not last:
            with self.objective.no_sync():
                yield
        else:
            yield

    def _gradients(self) -> list[Tensor]:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _average(gradients: list[Tensor], group: dist.ProcessGroup | None, size: int, groups: int = 1) -> None:
    """Average the gradients over the `size` processes of a group and the groups of micro-batches of each, in place."""
    waiting = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients] if size > 1 else []
    for work in waiting:
        work.wait()
    torch._foreach_div_(gradients, float(size * groups))


def shard(objective: Objective, world: World, bf16: bool) -> None:
    """Divide the weights of each block over all processes, by FSDP2, which changes the module in place.

    Inputs are not cast: in bf16, the rotations of a layout would lose precision at large positions. Neither are the weights
    outside the blocks: the residual stream has the dtype of the embedding.
    """
    mesh = init_device_mesh(next(objective.parameters()).device.type, (world.size,))
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32 if bf16 else None, cast_forward_inputs=False)
    inside = replace(outside, param_dtype=torch.bfloat16) if bf16 else outside
    for block in objective.model.backbone.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inside)
    fully_shard(objective, mesh=mesh, mp_policy=outside)


def part_of(batch: Batch, world: World, device: torch.device) -> Batch:
    """The part of a batch's sequences that this process reads, on its device.

    The boundaries of documents stay on the CPU: the layout of a batch is made from them there, and need not wait for a GPU.
    """
    if world.context_parallel > 1:
        length = batch.inputs.shape[1] // world.context_parallel
        first = world.rank % world.context_parallel * length
        part = slice(first, first + length)
        batch = batch._replace(inputs=batch.inputs[:, part], targets=batch.targets[:, part])
    prefix_lengths = None if batch.prefix_lengths is None else to_device(batch.prefix_lengths, device)
    return Batch(to_device(batch.inputs, device), to_device(batch.targets, device), batch.cu_seqlens, prefix_lengths)
