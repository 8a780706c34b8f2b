"""The difference between two evaluations on the same tokens, which is known far more precisely than either loss."""

from dataclasses import dataclass

import torch

from lineartime.errors import ArgumentError
from lineartime.evaluation.perplexity import Evaluation, mean_over_rows


@dataclass(frozen=True)
class Difference:
    """How far the loss of a second model is above that of a first one, on the same tokens.

    Attributes:
        loss: the second loss minus the first, in nats per token.
        loss_error: its standard error, with windows as samples; None for a single window. What makes a window hard for both
            models does not count.
        bits_per_byte: the difference in bits per byte; None for masked tokens.
        bits_per_byte_error: its standard error.
    """

    loss: float
    loss_error: float | None
    bits_per_byte: float | None
    bits_per_byte_error: float | None


def difference(first: Evaluation, second: Evaluation) -> Difference:
    """Compare two evaluations window by window, or piece by piece of the carried context.

    Of streams of tokens in memory, only the names are compared: that their tokens are the same is for the caller to know.

    Raises:
        ArgumentError: if they are not of the same tokens in the same windows, because the text, the tokenizer, the context or
            the task differs.
    """
    compared = {"text or tokenizer": "digest", "task": "masked", "context": "context"}
    if not (first.digest and second.digest):
        compared = {"text": "text", **compared}
    for what, attribute in compared.items():
        if getattr(first, attribute) != getattr(second, attribute):
            raise ArgumentError("second", f"is an evaluation with another {what}: the two must read the same tokens.")
    if not torch.equal(first.samples[:, 1], second.samples[:, 1]):
        raise ArgumentError("second", "predicts other tokens than the first: the two must read the same tokens.")
    mean = mean_over_rows(second.samples[:, 0] - first.samples[:, 0], first.samples[:, 1])
    assert mean is not None  # an evaluation has predicted tokens
    if first.bits_per_byte is None or not first.loss:
        return Difference(mean.loss, mean.error, None, None)
    bits = first.bits_per_byte / first.loss
    return Difference(mean.loss, mean.error, bits * mean.loss, None if mean.error is None else bits * mean.error)
