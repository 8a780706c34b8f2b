"""The loss on held-out text during training, divided over the processes of the run.

Shapes: B batch, T tokens of context.
"""

import torch
from torch import Tensor, nn

from lineartime.data import Batch, Tokenizer, TokenStream, causal_batch, masked_batch, read_window, spread_windows
from lineartime.errors import LineartimeError
from lineartime.machine import autocast
from lineartime.ops.cross_entropy import IGNORED
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World
from lineartime.training.parallel import part_of


class Validation:
    """Evaluates on windows spread evenly over held-out text, the same ones every time.

    Args:
        objective: the sum of the losses of a batch, as a module.
        stream: the held-out text.
        tokenizer: the one that encoded it.
        config: the run's options.
        world: the processes of the run.
        slice_unit: if processes share sequences, the length of a window is a multiple of this.

    Raises:
        LineartimeError: for less text than one such window.
    """

    def __init__(
        self,
        objective: nn.Module,
        stream: TokenStream,
        tokenizer: Tokenizer,
        config: TrainConfig,
        world: World,
        slice_unit: int,
    ) -> None:
        self._objective = objective
        self._stream = stream
        self._tokenizer = tokenizer
        self._config = config
        self._world = world
        self._length = config.context_length
        if world.context_parallel > 1 and len(stream) <= self._length:  # the longest window that can be sliced
            self._length = (len(stream) - 1) // slice_unit * slice_unit
            if self._length <= 0:
                raise LineartimeError(
                    f"The held-out text has {len(stream)} tokens, too few for slices of whole chunks ({slice_unit} + 1): "
                    "give more text, or use a smaller context_parallel."
                )
        self._starts = spread_windows(stream, config.eval_windows, self._length)

    @torch.no_grad()
    def loss(self) -> float:
        """The mean over all targets, in nats."""
        config, world = self._config, self._world
        device = next(self._objective.parameters()).device
        total, count = 0.0, 0
        self._objective.eval()
        with torch.compiler.set_stance("force_eager"):  # these shapes are too rare to be worth compiling
            for batch in self._batches():
                with autocast(device, config.precision == "bf16"):
                    total += float(self._objective(*part_of(batch, world, device)))
                count += int((batch.targets != IGNORED).sum())
        self._objective.train()
        total, targets = world.sum(total, count / world.context_parallel)
        return total / max(1.0, targets)

    def _batches(self) -> list[Batch]:
        """This process's batches; all have the same number, since FSDP needs every process in each forward pass."""
        config, world = self._config, self._world
        together = config.batch_size * world.data_ranks
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
        window = read_window(self._stream, self._starts[index], self._length + 1)[None]
        batch = causal_batch(window) if self._config.task == "clm" else masked_batch(window, self._tokenizer, [(0, index)])
        return batch.inputs, batch.targets
