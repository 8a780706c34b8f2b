"""Runs that Ctrl-C interrupts, and runs of several processes, as torchrun starts them, but within tenths of a second."""

import json
import multiprocessing
import os
import runpy
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lineartime.training.config import TrainConfig
from lineartime.training.loop import Trainer

# What each process does: it takes its place from the environment, like one that torchrun started.
SCRIPT = """
import os, warnings
from pathlib import Path
os.environ.update(ENVIRONMENT)
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
config = TrainConfig.from_dict(CONFIG)
try:
    exec(BEFORE)
    train(config)
except LineartimeError as error:
    Path(ERROR_FILE).write_text(f"{type(error).__name__}: {error}")
    os._exit(1)
"""

Launch = Callable[..., "Processes"]


class Processes:
    """The processes of one run."""

    def __init__(self, processes: list[BaseProcess], folder: Path) -> None:
        self.processes = processes
        self.folder = folder

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Their exit statuses; those that still run after that time are killed, and have None."""
        for process in self.processes:
            process.join(seconds)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        """End all of them at once."""
        for process in self.processes:
            process.kill()
            process.join()

    def errors(self) -> list[str]:
        """What each of them had to complain of; empty where that is nothing."""
        files = [self.folder / f"error-{rank}.txt" for rank in range(len(self.processes))]
        return [file.read_text() if file.exists() else "" for file in files]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """`launch(config, 2)`: train in two processes; `before` is run in each of them first, `only` names those to start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lineartime.training.loop"])  # so that each process need not import it
    script = tmp_path / "process.py"
    script.write_text(SCRIPT)
    started: list[Processes] = []

    def start(config: TrainConfig, size: int, *, before: str = "", only: tuple[int, ...] | None = None) -> Processes:
        folder = tmp_path / f"processes-{len(started)}"
        folder.mkdir()
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
            values: dict[str, Any] = {
                "ENVIRONMENT": environment,
                "CONFIG": json.loads(json.dumps(config.to_dict())),
                "BEFORE": before,
                "ERROR_FILE": str(folder / f"error-{rank}.txt"),
            }
            process = context.Process(target=runpy.run_path, args=(str(script), values))
            if only is None or rank in only:
                process.start()
                processes.append(process)
        started.append(Processes(processes, folder))
        return started[-1]

    yield start
    for processes in started:
        processes.kill()


@pytest.fixture
def interrupt_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """`with interrupt_after(3)`: press Ctrl-C while step 3 is computed."""

    @contextmanager
    def interrupting(step: int) -> Iterator[None]:
        take = Trainer.take_step

        def take_and_interrupt(self: Trainer, *arguments: Any) -> bool:
            if self.step + 1 == step:
                os.kill(os.getpid(), signal.SIGINT)
            return take(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "take_step", take_and_interrupt)
            yield

    return interrupting
