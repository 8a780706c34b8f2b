"""The result of `train`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lineartime.checkpoint import best_checkpoint, load_with_tokenizer
from lineartime.models.language_model import CausalLM, MaskedLM
from lineartime.runs.curve import draw_curve
from lineartime.runs.metrics import losses, read_metrics


@dataclass(frozen=True)
class TrainingResult:
    """A run that has ended, read from its folder `run`. `step` counts the steps taken so far.

    After an interrupt, it is not `finished`: it is saved, and `resume=True` continues it.
    """

    run: Path
    step: int
    finished: bool

    @property
    def training_losses(self) -> dict[int, float]:
        """The loss of each step, in nats per token. Raises LineartimeError if the metrics cannot be read."""
        return losses(read_metrics(self.run), "loss")

    @property
    def validation_losses(self) -> dict[int, float]:
        """The loss of each evaluation on held-out text by step, in nats per token. Raises LineartimeError."""
        return losses(read_metrics(self.run), "validation_loss")

    @property
    def checkpoint(self) -> Path:
        """The checkpoint with the lowest validation loss."""
        return best_checkpoint(self.run)

    @cached_property
    def model(self) -> CausalLM | MaskedLM:
        """The model of that checkpoint, on the CPU in evaluation mode; loaded at first use."""
        return load_with_tokenizer(self.checkpoint).model

    def draw_curve(self) -> Path:
        """Plot the losses into the run's folder and return the path of the image. Raises LineartimeError without matplotlib."""
        return draw_curve(self.run)
