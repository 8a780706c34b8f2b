"""How the next token of a text is drawn.

Shapes: B texts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.fields import Between, Positive, check_fields
from lineartime.models.language_model import are_finite
from lineartime.ops.tracing import is_traced

HEAD = 128
"""The number of likeliest tokens that are ranked first, and eight times as many next: ranking all takes longer than a step."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw only from this many of the likeliest tokens; 0 for all tokens.
        top_p: draw only from the likeliest tokens that together reach this probability; 1 for all tokens.
        seed: the seed of the random draws; None for a different one each time.
        min_p: draw only from tokens with at least this share of the probability of the likeliest one; 0 for all tokens
            (arXiv 2407.01082).
        repetition_penalty: of tokens in the prompt and of those drawn so far, positive logits are divided by it and negative
            ones multiplied (arXiv 1909.05858); 1 for no penalty. What a `state` has read before the prompt does not count.

    Raises:
        ArgumentError: for a value of the wrong type or out of range.
    """

    temperature: Annotated[float, Between(0)] = 0.8
    top_k: Annotated[int, Between(0)] = 0
    top_p: Annotated[float, Between(above=0, most=1)] = 0.95
    seed: Annotated[int, Between(0, below=2**63)] | None = None
    min_p: Annotated[float, Between(0, 1)] = 0.0
    repetition_penalty: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def generator(self) -> torch.Generator:
        """A random number generator with this seed."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def checked_sampling(sampling: Sampling | None) -> Sampling:
    """The given sampling, or the default for None. Raises ArgumentError for anything else."""
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ArgumentError("sampling", f"is {sampling!r}, but must be a Sampling, for instance Sampling(temperature=0.8).")
    return Sampling() if sampling is None else sampling


def seen_in(texts: Sequence[Sequence[int]], vocab_size: int, sampling: Sampling) -> Tensor | None:
    """Which tokens each text has, bool [B, V], on the CPU; None if repetitions are not penalised."""
    if sampling.repetition_penalty == 1:
        return None
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool, device="cpu")
    for row, text in zip(seen, texts, strict=True):
        row[torch.tensor(list(text), dtype=torch.long, device="cpu")] = True
    return seen


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator, seen: Tensor | None = None) -> Tensor:
    """`pick` by the numbers of a generator, on the CPU."""
    logits = logits.float().cpu()
    return pick(logits, sampling, uniform_numbers(len(logits), generator), seen)


def uniform_numbers(count: int, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) for `pick`, on the CPU. They have one dtype everywhere: in another one, a seed draws other numbers."""
    return torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")


def pick(logits: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None = None) -> Tensor:
    """Draw a token for each text by a number in [0, 1): logits [B, V] and numbers [B] -> int64 [B]; -1 unless finite.

    The drawn tokens are added to `seen`, bool [B, V], which is needed for a penalty of repetitions alone. On a GPU, this copies
    nothing to the host, so it can be part of a CUDA graph.
    """
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    tokens = torch.where(are_finite(logits), _picked(logits, sampling, uniform), -1)
    if seen is not None:
        seen.scatter_(1, tokens[:, None].clamp(min=0), True)
    return tokens


def _picked(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """`pick` for finite logits."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities, tokens = _ranked(logits.float(), sampling)
    if sampling.min_p:
        enough = probabilities >= sampling.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(enough, probabilities, 0.0)
    # Sums on a GPU may be added in another order each time; in float64, a seed still repeats its text.
    sums = probabilities.cumsum(-1, dtype=torch.float64 if probabilities.is_cuda else uniform.dtype)
    # Keep the shortest head of the ranking that reaches top_p: the tokens before each kept one do not reach it.
    kept = torch.full_like(sums[:, :1], sums.shape[-1], dtype=torch.long)
    if sampling.top_p < 1:
        kept = (sums - probabilities < sampling.top_p).sum(-1, keepdim=True)
    last = (kept - 1).clamp(min=0)  # of logits that are NaN, no token is kept
    total = sums.gather(-1, last)
    # The product may be rounded up to the total, which no token exceeds.
    reached = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = (sums <= reached).sum(-1, keepdim=True).minimum(last)  # a wrong index would end the process of a GPU
    return (place if tokens is None else tokens.gather(-1, place))[:, 0]


def _ranked(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """The probabilities of the likeliest tokens, enough for top_p, in descending order, and these tokens: both [B, n].

    If no ranking is needed, the probabilities of all tokens in order, and None.
    """
    # Relative to the largest logit, so that no temperature overflows; a GPU multiplies by the inverse, which must be finite.
    temperature = max(sampling.temperature, torch.finfo(logits.dtype).tiny)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    if sampling.top_k:
        ranked, tokens = scores.topk(min(sampling.top_k, scores.shape[-1]))
        return ranked.softmax(-1), tokens
    probabilities = scores.softmax(-1)
    if logits.device.type == "cpu" and not is_traced():  # what depends on values would make a GPU and a graph wait
        if sampling.top_p == 1:
            return probabilities, None
        head = HEAD
        while 4 * head < probabilities.shape[-1]:
            ranked, tokens = probabilities.topk(head)
            if bool((ranked.sum(-1, dtype=torch.float64) >= sampling.top_p).all()):
                return ranked, tokens
            head *= 8
    return probabilities.sort(-1, descending=True)
