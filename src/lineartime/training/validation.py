"""The loss on held-out text during training, computed by all processes of the run."""

import torch
from torch import nn

from lineartime.data import Batch, evaluation_batch, read_window, spread_windows
from lineartime.errors import Argument, LineartimeError
from lineartime.machine import autocast
from lineartime.ops.cross_entropy import IGNORED
from lineartime.training.distributed import World
from lineartime.training.interrupts import Stop
from lineartime.training.parallel import part_of
from lineartime.training.setup import Setup


class Validation:
    """Evaluates on windows spread evenly over held-out text, the same ones every time.

    `objective` computes the sum of a batch's losses. A text that is shorter than a window is read as one shorter window. Raises
    LineartimeError if processes share sequences and the text is too short for a whole chunk for each of them.
    """

    def __init__(self, objective: nn.Module, setup: Setup, world: World) -> None:
        self._objective = objective
        self._setup = setup
        self._world = world
        self._length = setup.config.context_length
        available, unit = len(setup.text.validation), setup.slice_unit
        if world.context_parallel > 1 and available <= self._length:  # the longest window that can be sliced
            self._length = (available - 1) // unit * unit
            if self._length <= 0:
                raise LineartimeError(
                    f"The held-out text has {available} tokens, too few for slices of whole chunks ({unit} + 1): "
                    "give more text, or a smaller ",
                    Argument("context_parallel"),
                    ".",
                )
        self._starts = spread_windows(setup.text.validation, setup.config.eval_windows, self._length)

    @torch.no_grad()
    def loss(self, stop: Stop | None = None) -> float | None:
        """The mean over all targets, in nats; None if any process is asked to stop before the end."""
        setup, world = self._setup, self._world
        total, count, stopped = 0.0, 0, False
        self._objective.eval()
        with torch.compiler.set_stance("force_eager"):  # these shapes are too rare to be worth compiling
            for batch in self._batches():
                stopped = stop is not None and world.sum(stop.requested) != [0]
                if stopped:
                    break
                with autocast(setup.device, setup.config.precision == "bf16"):
                    total += float(self._objective(*part_of(batch, world, setup.device)))
                count += int((batch.targets != IGNORED).sum())
        self._objective.train()
        if stopped:
            return None
        total, targets = world.sum(total, count / world.context_parallel)
        if not targets:
            raise LineartimeError(
                f"The held-out text, {setup.text.validation.name}, has no token to predict: give more text to hold out."
            )
        return total / targets

    def _batches(self) -> list[Batch]:
        """This process's batches. All processes have equally many, since FSDP needs every process in each forward pass."""
        world = self._world
        together = self._setup.config.batch_size * world.data_ranks
        batches = []
        for first in range(0, len(self._starts), together):
            indices = list(range(first, min(first + together, len(self._starts))))
            own = indices[world.data_rank :: world.data_ranks]
            batch = self._batch(own or indices[:1])
            batches.append(batch if own else batch._replace(targets=torch.full_like(batch.targets, IGNORED)))
        return batches

    def _batch(self, indices: list[int]) -> Batch:
        """The batch of some windows, which does not depend on the other windows."""
        setup, text = self._setup, self._setup.text.validation
        windows = torch.stack([read_window(text, self._starts[index], self._length + 1) for index in indices])
        return evaluation_batch(setup.config.task, windows, setup.tokenizer, indices, packed=setup.config.packed)
