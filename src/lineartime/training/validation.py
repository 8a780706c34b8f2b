"""The loss on held-out text during training, divided over the processes of the run.

Shapes: B batch, T tokens of context.
"""

import torch
from torch import Tensor, nn

from lineartime.data import Batch, causal_batch, masked_batch, read_window, spread_windows
from lineartime.errors import Argument, LineartimeError
from lineartime.machine import autocast
from lineartime.ops.cross_entropy import IGNORED
from lineartime.training.distributed import World
from lineartime.training.interrupts import Stop
from lineartime.training.parallel import part_of
from lineartime.training.setup import Setup


class Validation:
    """Evaluates on windows spread evenly over held-out text, the same ones every time.

    `objective` computes the sum of a batch's losses. LineartimeError if the text is shorter than one window.
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
        device, world = self._setup.device, self._world
        total, count = 0.0, 0
        self._objective.eval()
        stopped = False
        with torch.compiler.set_stance("force_eager"):  # these shapes are too rare to be worth compiling
            for batch in self._batches():
                stopped = stop is not None and world.sum(stop.requested) != [0]
                if stopped:
                    break
                with autocast(device, self._setup.config.precision == "bf16"):
                    total += float(self._objective(*part_of(batch, world, device)))
                count += int((batch.targets != IGNORED).sum())
        self._objective.train()
        if stopped:
            return None
        total, targets = world.sum(total, count / world.context_parallel)
        return total / max(1.0, targets)

    def _batches(self) -> list[Batch]:
        """This process's batches; all have the same number, since FSDP needs every process in each forward pass."""
        world = self._world
        together = self._setup.config.batch_size * world.data_ranks
        batches = []
        for first in range(0, len(self._starts), together):
            indices = list(range(first, min(first + together, len(self._starts))))
            own = indices[world.data_rank :: world.data_ranks]
            windows = [self._row(index) for index in own or indices[:1]]
            inputs, targets = (torch.cat(rows) for rows in zip(*windows, strict=True))
            batches.append(Batch(inputs, targets if own else torch.full_like(targets, IGNORED), None))
        return batches

    def _row(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets [1, T] of a window."""
        setup = self._setup
        window = read_window(setup.text.validation, self._starts[index], self._length + 1)[None]
        batch = causal_batch(window) if setup.config.task == "clm" else masked_batch(window, setup.tokenizer, [(0, index)])
        return batch.inputs, batch.targets
