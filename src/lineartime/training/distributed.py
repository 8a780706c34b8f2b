"""The processes of a run: who takes part, what they tell each other besides gradients, and what happens if one is lost.

They are started by torchrun, each with its place in the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...); without it a run is
one process, which exchanges nothing.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lineartime.errors import LineartimeError, ReportedError
from lineartime.training.liveness import meet, naming_the_lost

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """This process among those of the run.

    Attributes:
        rank: its number, from 0 on.
        size: how many there are.
        local_rank: its number among those of the same machine.
        context_parallel: how many processes share each sequence; neighbours in rank do.
        context_group: those that share this process's sequences; None if it reads them alone.
        checkpoint_group: of all processes, for writing checkpoints in the background; None if there is one.
        store: what the processes leave notes in; None if there is one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    context_parallel: int = 1
    context_group: dist.ProcessGroup | None = None
    checkpoint_group: dist.ProcessGroup | None = None
    store: dist.Store | None = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that shows, records and names checkpoints."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which share of the data this process reads, of `data_ranks`."""
        return self.rank // self.context_parallel

    @property
    def data_ranks(self) -> int:
        """How many shares of the data there are."""
        return self.size // self.context_parallel

    @property
    def context_rank(self) -> int:
        """Which part of its sequences this process reads, of `context_parallel`."""
        return self.rank % self.context_parallel

    def sum(self, *values: float) -> list[float]:
        """Each of these numbers, summed over all processes."""
        if self.size == 1:
            return [float(value) for value in values]
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals)
        return [float(total) for total in totals]

    def share(self, make: Callable[[], Result]) -> Result:
        """What the main process makes, in all processes; what it raises instead ends all of them."""
        if self.size == 1:
            return make()
        made: list[Any] = [None]
        if self.is_main:
            try:
                made = [(make(), "")]
            except LineartimeError as error:
                made = [(None, str(error))]
        dist.broadcast_object_list(made, src=0, device=torch.device("cpu"))
        result, message = made[0]
        if message:
            raise LineartimeError(message) if self.is_main else ReportedError(message)
        kept: Result = result
        return kept

    def gather(self, value: Result) -> list[Result]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first_on_each_machine(self, name: str, make: Callable[[], Result]) -> Result:
        """What `make` gives, called by one process of each machine before the others: it leaves files that they find.

        That may take hours, for which no collective has to wait; when this returns, all machines are done.
        """
        if self.store is None:
            return make()
        machine, machines = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        if self.local_rank == 0:
            try:
                result = make()
            except BaseException:
                self.store.set(f"first/{name}/{machine}", "failed")
                time.sleep(1)  # the store may be of this process, and the others have yet to read it
                raise
            self.store.set(f"first/{name}/{machine}", "made")
        for other in range(machines):
            self.store.wait([f"first/{name}/{other}"], timedelta(days=30))
            if self.store.get(f"first/{name}/{other}") != b"made":
                raise ReportedError(f"The first process of machine {other} could not prepare {name}.")
        return result if self.local_rank == 0 else make()


def started_by_torchrun() -> bool:
    """Whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_main_process() -> bool:
    """Whether this process, perhaps one of several, is the one that talks to the user."""
    return int(os.environ.get("RANK", "0")) == 0


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def started_again() -> bool:
    """Whether torchrun has started this process in place of one that was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def join_world(device: torch.device, *, timeout: float, context_parallel: int = 1) -> Iterator[World]:
    """Meet the other processes that torchrun started, and part from them in the end.

    Args:
        device: what this process computes on.
        timeout: seconds to wait for the others: at the start, and whenever they exchange something.
        context_parallel: how many processes share each sequence.

    Raises:
        LineartimeError: if the processes cannot be divided so, or one of them does not come or is lost, naming it.
    """
    if not started_by_torchrun():
        if context_parallel > 1:
            raise LineartimeError(
                f"--context-parallel is {context_parallel}, but this is one process: start that many by "
                f"torchrun --nproc-per-node {context_parallel} -m lineartime train ..."
            )
        yield World()
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LineartimeError(
            f"WORLD_SIZE in the environment is {os.environ['WORLD_SIZE']}, but {missing[0]} is not set: start the processes by "
            "torchrun, which sets all of them."
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size % context_parallel:
        raise (LineartimeError if rank == 0 else ReportedError)(
            f"--context-parallel is {context_parallel}, which does not divide the {size} processes: use a divisor of {size}."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = meet(rank, size, timeout)
    wait = timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with naming_the_lost(store, rank, size, timeout):
        dist.init_process_group(
            backend,
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
            yield World(rank, size, local_rank(), context_parallel, context_group, checkpoint_group, store)
        finally:
            dist.destroy_process_group()
