"""How the next token of a text is drawn.

Shapes: B texts, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.fields import check_fields
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

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

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
        if not 0 <= self.min_p <= 1:
            raise ArgumentError("min_p", f"is {self.min_p}, but must be from 0 to 1.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ArgumentError("repetition_penalty", f"is {self.repetition_penalty}, but must be above 0; 1 for no penalty.")

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


@dataclass(eq=False)
class Seen:
    """Which tokens each text has, bool [B, V], for the penalty of repetitions."""

    mask: Tensor

    def add(self, tokens: Tensor) -> None:
        """Add one token to each text, int64 [B]; -1 stands for none."""
        self.mask.scatter_(1, tokens[:, None].clamp(min=0), True)

    def penalize(self, logits: Tensor, penalty: float) -> Tensor:
        """Make tokens of the texts less likely, [B, V] -> [B, V]."""
        return torch.where(self.mask, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def seen_in(texts: Sequence[Sequence[int]], vocab_size: int, sampling: Sampling) -> Seen | None:
    """The tokens of texts, on the CPU; None if repetitions are not penalised."""
    if sampling.repetition_penalty == 1:
        return None
    seen = Seen(torch.zeros(len(texts), vocab_size, dtype=torch.bool, device="cpu"))
    for row, text in zip(seen.mask, texts, strict=True):
        row[torch.tensor(list(text), dtype=torch.long, device="cpu")] = True
    return seen


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator, seen: Seen | None = None) -> Tensor:
    """Draw a token for each text: logits [B, V] -> int64 [B], on the CPU; -1 if the logits are not finite.

    The drawn tokens are added to `seen`, which is needed for a penalty of repetitions alone.
    """
    logits = logits.float().cpu()
    return pick(logits, sampling, uniform_numbers(len(logits), generator), seen)


def uniform_numbers(count: int, generator: torch.Generator) -> Tensor:
    """Numbers in [0, 1) for `pick`, on the CPU. They have one dtype everywhere: in another one, a seed draws other numbers."""
    return torch.rand(count, dtype=torch.float64, generator=generator, device="cpu")


def pick(logits: Tensor, sampling: Sampling, uniform: Tensor, seen: Seen | None = None) -> Tensor:
    """Like `draw`, but by a given number in [0, 1) for each text: [B, V] and [B] -> int64 [B], on the logits' device.

    On a GPU, it copies nothing to the host, so it can be part of a CUDA graph.
    """
    if seen is not None:
        logits = seen.penalize(logits, sampling.repetition_penalty)
    tokens = torch.where(are_finite(logits), _picked(logits, sampling, uniform), -1)
    if seen is not None:
        seen.add(tokens)
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
