"""Liveness of the processes of a run: they meet at the start and send heartbeats. If one is lost, the others name it.

They use the key-value store of torch.distributed, which is served by torchrun or else by process 0.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lineartime.errors import Argument, LineartimeError
from lineartime.training.environment import read_environment

_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 4.0
"""A process without a heartbeat for this long is considered lost."""


def rendezvous(meeting: int, rank: int, size: int, timeout: float) -> dist.Store:
    """Wait for all processes and return the store they share. Raises LineartimeError naming those that do not start.

    `meeting` is the same number in all of them: runs of the same processes, one after another, share nothing in the store.
    """
    store = _connect(meeting, rank, size, timeout)
    deadline = time.monotonic() + timeout
    missing = list(range(size))
    try:
        store.set(f"here/{rank}", "yes")
        while missing and time.monotonic() < deadline:
            missing = [other for other in missing if not store.check([f"here/{other}"])]
            if missing:
                time.sleep(0.02)
    except (RuntimeError, dist.DistError):  # the process that served the store is lost
        missing = [0]
    if missing:
        raise LineartimeError(
            f"{_processes(missing, size)} did not start within {timeout:g} s (timeout): their own output says why; then "
            "start all of them again."
        )
    return store


@contextmanager
def watch_ranks(store: dist.Store, meeting: int, rank: int, size: int, timeout: float) -> Iterator[None]:
    """Send heartbeats, and turn a failed exchange into a LineartimeError that names the lost process."""
    ended = threading.Event()
    # Its own connection: a thread that waits on a store blocks all others that use it.
    pulse = _connect(meeting, rank, size, timeout)
    threading.Thread(target=_beat, args=(pulse, rank, ended), daemon=True).start()
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
            raise
        lost = _silent(store, rank, size)
        if lost:
            what = f"{_processes(lost, size)} was lost" if len(lost) == 1 else f"{_processes(lost, size)} were lost"
        else:
            what = f"The processes exchanged nothing for {timeout:g} s, though all of them are alive"
        raise LineartimeError(
            f"{what}: their own output says why; then resume the run from its last checkpoint with ",
            Argument("resume", True),
            ".",
        ) from None
    finally:
        ended.set()


def _connect(meeting: int, rank: int, size: int, timeout: float) -> dist.Store:
    environment = read_environment()
    host, port = os.environ["MASTER_ADDR"], environment.master_port or 0
    # torchrun, which outlives all processes, serves the store if it can.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not serves:
            _wait_for_server(host, port, timeout)
        soon = timedelta(seconds=min(timeout, 5.0))  # it answered a moment ago
        store = dist.TCPStore(host, port, size, serves, soon, wait_for_workers=False, multi_tenant=True)
        store.set_timeout(timedelta(seconds=timeout))
    except (OSError, RuntimeError, dist.DistError):
        raise LineartimeError(
            f"Process {rank} of {size} found no server at {host}:{port} within {timeout:g} s (timeout): process 0, or "
            "torchrun, is not running there; its own output says why."
        ) from None
    # Processes from before a restart, and earlier runs of these processes, used other prefixes.
    return dist.PrefixStore(f"lineartime/{environment.restart_count}/{meeting}", store)


def _wait_for_server(host: str, port: int, timeout: float) -> None:
    """Retry until the server answers. Raises OSError after the timeout; the store itself would retry for twice as long."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _beat(store: dist.Store, rank: int, ended: threading.Event) -> None:
    try:
        while not ended.wait(_BEAT_SECONDS):
            store.add(f"beat/{rank}", 1)
    except (RuntimeError, dist.DistError):  # the store is gone; its next user reports that
        return


def _silent(store: dist.Store, rank: int, size: int) -> list[int]:
    """The other processes whose heartbeats have stopped."""
    others = [other for other in range(size) if other != rank]
    try:
        before = {other: store.add(f"beat/{other}", 0) for other in others}
        deadline = time.monotonic() + _SILENCE_SECONDS
        while others and time.monotonic() < deadline:
            time.sleep(_BEAT_SECONDS / 2)
            others = [other for other in others if store.add(f"beat/{other}", 0) == before[other]]
    except (RuntimeError, dist.DistError):
        return [0] if rank else []  # the process that served the store is lost
    return others


def _processes(ranks: list[int], size: int) -> str:
    names = [str(rank) for rank in ranks]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{'Process' if len(names) == 1 else 'Processes'} {listed} of {size} (counted from 0)"
