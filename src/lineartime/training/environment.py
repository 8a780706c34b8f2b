"""What torchrun tells a process in its environment: WORLD_SIZE, RANK, MASTER_PORT, ... Without it, there is one process."""

import os
import re
from dataclasses import dataclass

from lineartime.errors import LineartimeError
from lineartime.fields import shown

_MOST = 1 << 20
"""The most processes of a run."""


@dataclass(frozen=True)
class Environment:
    """This process among those that torchrun started.

    Attributes:
        world_size: the number of processes.
        rank: its number, from 0.
        local_rank: its number on its machine.
        local_world_size: the processes on its machine.
        group_rank: the number of its machine.
        group_world_size: the machines.
        restart_count: how often torchrun has started the processes again.
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
    """What the environment tells; of one process alone, its ranks are 0 whatever other programs have set.

    Raises:
        LineartimeError: naming the variable, for what is no whole number or out of range.
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
        allowed = f"must be a whole number from {least:,} to {most:,}"
        advice = "start the processes with torchrun, which sets it, or unset it"
        raise LineartimeError(f"{name} in the environment is {shown(text)}, but {allowed}: {advice}.")
    return number
