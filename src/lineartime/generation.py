"""Generation: read the prompt once, then one token at a time, with the state carried along and nothing read twice.

Shapes: N tokens of the prompt, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.models.backbone import BackboneState
from lineartime.models.heads import CausalLM

PREFILL = 1024
"""Tokens of a prompt that are read at a time."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: only so many of the likeliest tokens can be drawn; 0 for all.
        top_p: only the likeliest tokens that together reach this probability can be drawn; 1 for all.
        seed: of the random draws; None for another one each time.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}, but must not be negative.")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, but must not be negative; 0 allows all tokens.")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, but must be from 0 to 2^63 - 1.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must be above 0 and at most 1.")

    def generator(self) -> torch.Generator:
        """The source of random draws that the seed stands for."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator


def generate(
    model: CausalLM, prompt: Sequence[int], max_tokens: int, sampling: Sampling, stop_token: int | None = None
) -> Iterator[int]:
    """Continue a prompt, token by token, each being yielded as soon as it is drawn.

    Args:
        model: a causal language model, in evaluation mode.
        prompt: token ids, at least one.
        max_tokens: how many tokens to draw at the most.
        sampling: how to draw them.
        stop_token: a token that ends the text; it is not yielded.

    Raises:
        ValueError: for an empty prompt.
    """
    if not prompt:
        raise ValueError("prompt is empty, but must hold at least one token, for instance the end of a document.")
    generator = sampling.generator()
    with torch.no_grad():
        logits, state = prefill(model, prompt)
    for drawn in range(max_tokens):
        token = draw(logits, sampling, generator)
        if token == stop_token:
            return
        yield token
        if drawn + 1 < max_tokens:
            with torch.no_grad():
                logits, state = _extend(model, [token], state)


def prefill(model: CausalLM, prompt: Sequence[int]) -> tuple[Tensor, BackboneState]:
    """Read a prompt, some tokens at a time: the logits [V] after its last token, and the state."""
    state = model.init_state(1)
    for start in range(0, len(prompt), PREFILL):
        logits, state = _extend(model, prompt[start : start + PREFILL], state)
    return logits, state


def _extend(model: CausalLM, tokens: Sequence[int], state: BackboneState) -> tuple[Tensor, BackboneState]:
    device = next(model.parameters()).device
    logits, state = model.extend(torch.tensor([tokens], device=device), state)
    return logits[0, -1], state


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from logits [V]."""
    logits = logits.float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    # From the largest down, in float64: however small the temperature, nothing overflows.
    ranked, tokens = ((logits - logits.max()).double() / sampling.temperature).sort(descending=True)
    if sampling.top_k:
        ranked, tokens = ranked[: sampling.top_k], tokens[: sampling.top_k]
    probabilities = ranked.softmax(0)
    # The shortest head of the ranking that reaches top_p: a token is in it if those before it do not reach it yet.
    probabilities[probabilities.cumsum(0) - probabilities >= sampling.top_p] = 0.0
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
