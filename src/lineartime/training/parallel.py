"""The processes of a run: how they meet, what they exchange, which weights each holds, and how they share the work of a step.

torchrun starts the processes and describes the place of each in environment variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).
Without torchrun, a run is a single process, which exchanges nothing.

The loss of a step is the sum of all losses divided by the number of targets, over all processes and micro-batches. Each process
differentiates its own sum times `size` / targets. The mean of these gradients over the processes is the gradient of that loss,
so the result does not depend on how a step is divided. If gradients are clipped before they are averaged, each group of
micro-batches differentiates its own mean loss. Local clipping makes each replica a group, so it depends on their number.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from lineartime.errors import ArgumentError, LineartimeError, ReportedError, first_line
from lineartime.fields import shown
from lineartime.models.language_model import LanguageModel
from lineartime.ops.context import context_group
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
    size, restarts = _number("WORLD_SIZE", 1), _number("TORCHELASTIC_RESTART_COUNT", 0)
    if size <= 1:
        return Environment(torchelastic_restart_count=restarts)
    ranks = _number("RANK", None, size), _number("LOCAL_RANK", 0, size), _number("LOCAL_WORLD_SIZE", size)
    return Environment(size, *ranks, _number("GROUP_RANK", 0), _number("GROUP_WORLD_SIZE", 1), restarts)


def _number(name: str, default: int | None, below: int | None = None) -> int:
    """A variable of the environment, or its default; None if it must be set."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not (text.isascii() and text.isdecimal()) or (below is not None and int(text) >= below):
        allowed = "a whole number" if below is None else f"a whole number below {below:,}"
        found = f"{name} in the environment is {shown(text)}, but must be {allowed}"
        raise LineartimeError(f"{found}: start the processes with torchrun, which sets it, or unset it.")
    return int(text)


@dataclass(frozen=True)
class World:
    """The place of this process among the processes of the run; numbers count from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    context_parallel: int = 1  # the number of processes that share each sequence; they are neighbours in rank
    context_group: dist.ProcessGroup | None = None  # those that share this one's sequences; None if it reads them alone
    checkpoint_group: dist.ProcessGroup | None = None  # all, to write checkpoints in the background; None if it is alone
    store: dist.Store | None = field(default=None, repr=False)  # the key-value store of all processes; None if it is alone

    @property
    def is_main(self) -> bool:
        """Whether this process shows progress, records metrics and publishes checkpoints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The index of the data share that this process reads, out of `data_ranks`."""
        return self.rank // self.context_parallel

    @property
    def data_ranks(self) -> int:
        """The number of shares of the data."""
        return self.size // self.context_parallel

    @property
    def context_rank(self) -> int:
        """The index of the part of each sequence that this process reads, out of `context_parallel`."""
        return self.rank % self.context_parallel

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

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Run a `with` block in every process. If it fails in one, it fails in all, and a single process reports the error.

        The block may read, check and compute, but must not communicate, since a process that fails skips the rest of it. Among
        the processes that failed, the one with the lowest rank raises its error; all other processes raise a ReportedError.
        """
        error: Exception | None = None
        try:
            yield
        except dist.DistError:  # another process is lost and would not answer
            raise
        except Exception as raised:
            error = raised
        failures = self.gather("" if error is None or isinstance(error, ReportedError) else str(error) or repr(error))
        speaker = next((rank for rank, failure in enumerate(failures) if failure), None)
        if error is not None and speaker in (self.rank, None):
            raise error
        if speaker is not None:
            raise ReportedError(failures[speaker])

    def reported_by_main(self, error: LineartimeError) -> LineartimeError:
        """The error to raise if all processes find the same one, so that only the main process reports it."""
        return error if self.is_main else ReportedError(str(error))

    def share(self, make: Callable[[], Result]) -> Result:
        """Make a value in the main process and return it in all processes. If that raises, all processes fail together."""
        made: Any = None
        with self.raise_on_all_ranks():
            if self.is_main:
                made = make()
        value: Result = self.gather(made)[0]
        return value

    def local_main_first(self, name: str, make: Callable[[], Result]) -> Result:
        """Call `make` first in one process of each machine, then in the others, which find the files that it wrote.

        The first call may take hours, so the others wait on the store, where no collective timeout applies. When this returns,
        the first calls have finished on all machines. If a call fails in one process, all processes fail together.
        """
        with self.raise_on_all_ranks():
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
                    raise ReportedError(f"The first process of machine {other} could not prepare {name}.")
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
    if size == 1:
        if context_parallel > 1:
            raise ArgumentError(
                "context_parallel", f"is {context_parallel}, but this is one process: start {context_parallel} with torchrun."
            )
        yield World()
        return
    if device.type == "mps":
        raise ArgumentError("device", "is mps, which supports only one process, but torchrun has started several: use cpu.")
    if size % context_parallel:
        found = f"is {context_parallel}, which does not divide the {size} processes: use a divisor of {size}."
        raise World(rank, size).reported_by_main(ArgumentError("context_parallel", found))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = timedelta(seconds=timeout)
    # Processes from before a restart, and earlier runs of these processes, used other prefixes.
    prefix = f"lineartime/{environment.torchelastic_restart_count}/{next(_RUNS)}"
    store = dist.PrefixStore(prefix, _meet(rank, size, timeout))
    with _lost_processes_reported(timeout):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=wait,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            context_group = None
            if context_parallel > 1:
                context_group, _ = dist.new_subgroups(group_size=context_parallel, timeout=wait)
            checkpoint_group = dist.new_group(backend="gloo", timeout=wait)
            yield World(rank, size, environment.local_rank, context_parallel, context_group, checkpoint_group, store)
        finally:
            # DDP frees its process group while holding the GIL, and joins the threads of gloo, which need it to free tensors.
            time.sleep(0.01)
            dist.destroy_process_group()


@cache  # it serves all runs of this process
def _meet(rank: int, size: int, timeout: float) -> dist.Store:
    """The key-value store of all processes. Process 0 serves it, or torchrun, which outlives all of them."""
    try:
        store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout)))[0]
    except ValueError as error:
        where = "The environment does not say where the processes meet"
        raise LineartimeError(
            f"{where} ({first_line(error).rstrip('.')}): start all of them with torchrun, which says it."
        ) from None
    except RuntimeError as error:  # a process is not there
        found, why = f"Process {rank} of {size} did not find the others", first_line(error).rstrip(".")
        advice = "start all of them with torchrun; the output of the one that is missing says why."
        raise LineartimeError(f"{found} within {timeout:g} s (timeout; {why}): {advice}") from None
    return store


@contextmanager
def _lost_processes_reported(timeout: float) -> Iterator[None]:
    """Turn a failed exchange, which torch.distributed ends after `timeout` at the latest, into a LineartimeError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
            raise
        raise LineartimeError(
            f"A process of the run was lost, or exchanged nothing for {timeout:g} s (timeout): its own output, or that of "
            "torchrun, says why; then resume the run from its last checkpoint with `resume=True`.",
        ) from None


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
