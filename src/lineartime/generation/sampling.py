"""How the next token of a text is drawn.

Shapes: B texts, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.fields import check_fields
from lineartime.models.language_model import check_logits


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw only from this many of the likeliest tokens; 0 for all tokens.
        top_p: draw only from the likeliest tokens that together reach this probability; 1 for all tokens.
        seed: the seed of the random draws; None for a different one each time.

    Raises:
        ArgumentError: for a value of the wrong type or out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.temperature >= 0:
            raise ArgumentError("temperature", f"is {self.temperature}, but must not be negative.")
        if self.top_k < 0:
            raise ArgumentError("top_k", f"is {self.top_k}, but must not be negative; 0 allows all tokens.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", f"is {self.seed}, but must be from 0 to 2^63 - 1.")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", f"is {self.top_p}, but must be above 0 and at most 1.")

    def generator(self) -> torch.Generator:
        """A random number generator with this seed."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def chosen(sampling: Sampling | None) -> Sampling:
    """The given sampling, or the default for None. Raises ArgumentError for anything else."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ArgumentError("sampling", f"is {sampling!r}, but must be a Sampling, for instance Sampling(temperature=0.8).")
    return Sampling() if sampling is None else sampling


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Draw a token for each text: logits [B, V] -> int64 [B], on the CPU."""
    logits = logits.float().cpu()
    check_logits(logits)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities, tokens = _allowed(logits, sampling, torch.float64)
    return tokens.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


def pick(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Like `draw`, but from a given number in [0, 1) for each text: [B, V] and [B] -> int64 [B], on the logits' device.

    It copies nothing to the host, so it can be part of a CUDA graph.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities, tokens = _allowed(logits.float(), sampling, torch.float32)
    reached = _running_sums(probabilities)
    below = (reached <= uniform[:, None] * reached[:, -1:]).sum(-1, keepdim=True)
    # The product may be rounded up to the sum: the last token that can be drawn is the last with a nonzero probability.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    # Of logits that are NaN, no probability is above zero; a wrong index would end the process of a GPU.
    return tokens.gather(-1, below.minimum(last).clamp(min=0))[:, 0]


def _allowed(logits: Tensor, sampling: Sampling, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The unnormalised probabilities of the likeliest tokens, in descending order, and these tokens: both [B, n].

    A probability is 0 if top_p excludes the token.
    """
    # Relative to the largest logit, so that no temperature overflows; a GPU multiplies by the inverse, which must be finite.
    temperature = max(sampling.temperature, torch.finfo(dtype).tiny)
    scores = (logits - logits.amax(-1, keepdim=True)).to(dtype) / temperature
    ranked, tokens = scores.topk(min(sampling.top_k, scores.shape[-1])) if sampling.top_k else scores.sort(-1, descending=True)
    probabilities = ranked.softmax(-1)
    # Keep the shortest head of the ranking that reaches top_p: the tokens before each kept one do not reach it.
    return probabilities.masked_fill(_running_sums(probabilities) - probabilities >= sampling.top_p, 0.0), tokens


def _running_sums(probabilities: Tensor) -> Tensor:
    """The sums up to each token. A GPU may add in another order each time; in float64, a seed still repeats its text."""
    return probabilities.cumsum(-1, dtype=torch.float64 if probabilities.is_cuda else None)
