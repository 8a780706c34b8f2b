"""The environment variables that torchrun sets: WORLD_SIZE, RANK, MASTER_PORT, ... Without them, there is one process."""

import os
import re
from dataclasses import dataclass

from lineartime.errors import LineartimeError
from lineartime.fields import shown

_MOST = 1 << 20
"""The maximum number of processes in a run."""


@dataclass(frozen=True)
class Environment:
    """The place of this process among those that torchrun started.

    Attributes:
        world_size: the number of processes.
        rank: its number, from 0.
        local_rank: its number on its machine, from 0.
        local_world_size: the number of processes on its machine.
        group_rank: the number of its machine, from 0.
        group_world_size: the number of machines.
        restart_count: how often torchrun has restarted the processes.
        master_port: the port of the server where they meet; None if it is not set.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1
    group_rank: int = 0
    group_world_size: int = 1
    restart_count: int = 0
    master_port: int | None = None


def read_environment() -> Environment:
    """Read the environment. A single process has ranks of 0, whatever other programs have set.

    Raises:
        LineartimeError: naming the variable, if it is not an integer or out of range.
    """
    size = _number("WORLD_SIZE", 1, 1, _MOST)
    restarts = _number("TORCHELASTIC_RESTART_COUNT", 0, 0, 10**9)
    if size == 1:
        return Environment(restart_count=restarts)
    machines = _number("GROUP_WORLD_SIZE", 1, 1, size)
    return Environment(
        size,
        _number("RANK", 0, 0, size - 1),
        _number("LOCAL_RANK", 0, 0, size - 1),
        _number("LOCAL_WORLD_SIZE", size, 1, size),
        _number("GROUP_RANK", 0, 0, machines - 1),
        machines,
        restarts,
        _number("MASTER_PORT", 0, 1, 65535) or None,
    )


def _number(name: str, default: int, least: int, most: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    number = int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,20}\s*", text) else None
    if number is None or not least <= number <= most:
        allowed = f"must be an integer from {least:,} to {most:,}"
        advice = "start the processes with torchrun, which sets it, or unset it"
        raise LineartimeError(f"{name} in the environment is {shown(text)}, but {allowed}: {advice}.")
    return number
