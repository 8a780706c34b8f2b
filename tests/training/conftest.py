"""Runs that Ctrl-C interrupts, and runs of several processes, as torchrun starts them, but within tenths of a second."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lineartime.training.config import TrainConfig
from lineartime.training.loop import Trainer

# What each process does: it takes its place from the environment, like one that torchrun started.
SCRIPT = """
import os, warnings
from pathlib import Path
os.environ.update({environment!r})
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
import lineartime.runs.metrics
lineartime.runs.metrics.draw_curve = lambda run: run  # as in the fixture `without_pictures`
config = TrainConfig.from_dict({config!r})
try:
    exec({before!r})
    train(config)
except LineartimeError as error:
    Path({error_file!r}).write_text(f"{{type(error).__name__}}: {{error}}")
    os._exit(1)
"""

Fork = Callable[[str], Any]
Launch = Callable[..., "Processes"]
MakeConfig = Callable[..., TrainConfig]


class Processes:
    """The processes of one run."""

    def __init__(self, processes: list[Any], folder: Path) -> None:
        self.processes = processes
        self.folder = folder

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Their exit statuses; those that still run after that time are killed, and have None."""
        codes = [process.wait(seconds) for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """End all of them at once."""
        for process in self.processes:
            process.kill()

    def errors(self) -> list[str]:
        """The error of each of them: of lineartime, or what it wrote last; empty where there is none."""
        files = [self.folder / f"error-{rank}.txt" for rank in range(len(self.processes))]
        return [
            file.read_text() if file.exists() else process.output if "Traceback" in process.output else ""
            for file, process in zip(files, self.processes, strict=True)
        ]


@pytest.fixture
def launch(fork: Fork, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """`launch(config, 2)`: train in two processes; `before` is run in each of them first, `only` names those to start."""

    def start(config: TrainConfig, size: int, *, before: str = "", only: tuple[int, ...] | None = None) -> Processes:
        folder = tmp_path_factory.mktemp("processes")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        processes = []
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            values = json.loads(json.dumps(config.to_dict()))
            error_file = str(folder / f"error-{rank}.txt")
            code = SCRIPT.format(environment=environment, config=values, before=before, error_file=error_file)
            if only is None or rank in only:
                processes.append(fork(code))
        return Processes(processes, folder)

    return start


@contextmanager
def interrupting(step: int) -> Iterator[None]:
    """`with interrupting(3)`: press Ctrl-C while step 3 is computed."""
    take = Trainer.take_step

    def take_and_interrupt(self: Trainer, *arguments: Any) -> bool:
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_step", take_and_interrupt)
        yield
