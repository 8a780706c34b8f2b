"""Generation: read the prompt once, then extend the text token by token from the state; no token is read twice.

Shapes: N tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.generation.batch import TextBatch
from lineartime.generation.decoding import Sampling, checked_sampling, draw, drawing, seen_in
from lineartime.generation.prompts import Ids, PromptState, checked_prompt, load_state, read, read_prompt, save_state, token_ids
from lineartime.models.language_model import CausalLM, LanguageModel, check_finite_logits, check_model
from lineartime.ops.checks import check_positive
from lineartime.ops.state import State

__all__ = [
    "Ids",
    "PromptState",
    "Sampling",
    "TextBatch",
    "generate",
    "generate_batch",
    "load_state",
    "read_prompt",
    "save_state",
]

_Start = tuple[tuple[int, ...], PromptState | None]
"""The beginning of a text: more tokens after a state."""


def generate(
    model: LanguageModel,
    prompt: Ids,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    state: PromptState | None = None,
) -> Iterator[int]:
    """Continue a prompt, and yield each token as soon as it is drawn.

    Args:
        model: a causal language model, in evaluation mode; one of task "prefix-lm" reads the prompt as its prefix.
        prompt: token ids: a sequence, a numpy array [N] or a tensor [N]; at least one without a `state`.
        max_tokens: the maximum number of tokens to draw.
        sampling: how to draw them; the default is `Sampling()`.
        stop_token: a token that ends the text; it is not yielded.
        state: of a text before the prompt, as `read_prompt` returns it; it is not modified.

    Raises:
        ArgumentError: for an empty prompt, an id outside the vocabulary, more tokens than the model can read, a state of
            another model, or an argument of the wrong type.
    """
    causal, (start,), sampling = _checked(model, {"prompt": prompt}, [state], max_tokens, sampling, stop_token)
    drawn = (token for (token,) in _drawn(causal, [start], max_tokens, sampling))
    return takewhile(lambda token: token != stop_token, drawn)


def _drawn(model: CausalLM, starts: Sequence[_Start], max_tokens: int, sampling: Sampling) -> Iterator[list[int]]:
    """Yield the next token of every text, `max_tokens` times. Texts that have ended are continued, too."""
    generator = sampling.generator()
    seen = seen_in([ids for ids, _ in starts], model.config.vocab_size, sampling)
    once = {start: read(model, *start) for start in dict.fromkeys(starts)}
    with torch.no_grad():
        tokens = draw(torch.stack([once[start].logits for start in starts]), sampling, generator, seen)
    yield _on_host(tokens)
    if max_tokens == 1:  # there may be no position for another one
        return
    with torch.no_grad():
        state = State.concatenate([once[start].state for start in starts])  # in memory of its own
        draw_next = drawing(model, state, sampling, generator, seen)
    del once, state  # the state of a long prompt may be large
    for _ in range(1, max_tokens):
        with torch.no_grad():
            tokens = draw_next(tokens)
        yield _on_host(tokens)


def _on_host(drawn: Tensor) -> list[int]:
    """Drawn tokens as numbers. Raises LineartimeError if the logits were not finite."""
    tokens: list[int] = drawn.tolist()
    check_finite_logits(min(tokens, default=0) >= 0)
    return tokens


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Ids],
    max_tokens: int,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    ended: Callable[[int, int], bool] | None = None,
    state: PromptState | Sequence[PromptState | None] | None = None,
) -> list[list[int]]:
    """Continue several prompts of any lengths together. The probabilities of a text do not depend on the other prompts.

    The model reads each prompt by itself, and equal prompts only once. Every step then adds a token to each text: with FLASH
    and the linear attentions, in constant time and memory, and on a GPU as a CUDA graph.

    Args:
        model: a causal language model, in evaluation mode.
        prompts: token ids, at least one in each that has no `state`.
        max_tokens, sampling, stop_token: as for `generate`; one generator draws for all texts, so that what is drawn for a text
            depends on the other prompts.
        ended: called with the number of a text and its new token; the text ends with this token if it returns True.
        state: of a text before all prompts, as `read_prompt` returns it, or of one, or None, before each; it is not modified.

    Returns:
        The tokens drawn for each prompt, without the stop token.

    Raises:
        ArgumentError: as for `generate`.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or getattr(prompts, "ndim", 1) == 0:
        raise ArgumentError("prompts", f"is {prompts!r}, but must be a sequence of prompts, each of them token ids.")
    if ended is not None and not callable(ended):
        raise ArgumentError("ended", f"is {ended!r}, but must be a function of the number of a text and its new token.")
    if not len(prompts):
        return []
    named = {f"prompts[{number}]": prompt for number, prompt in enumerate(prompts)}
    states: Sequence[PromptState | None] = state if isinstance(state, Sequence) else [state] * len(prompts)
    if len(states) != len(prompts):
        raise ArgumentError("state", f"has {len(states)} states for {len(prompts)} prompts: give one for each, or one for all.")
    causal, starts, sampling = _checked(model, named, states, max_tokens, sampling, stop_token)
    texts: list[list[int]] = [[] for _ in prompts]
    growing = set(range(len(prompts)))
    for tokens in _drawn(causal, starts, max_tokens, sampling):
        growing -= {text for text in growing if tokens[text] == stop_token}
        for text in sorted(growing):
            texts[text].append(tokens[text])
            if ended is not None and ended(text, tokens[text]):
                growing.remove(text)
        if not growing:
            break
    return texts


def _checked(
    model: object,
    prompts: Mapping[str, Ids],
    states: Sequence[PromptState | None],
    max_tokens: int,
    sampling: Sampling | None,
    stop_token: int | None,
) -> tuple[CausalLM, list[_Start], Sampling]:
    """The model, the beginnings of the texts, and how to draw. Raises ArgumentError for wrong arguments; prompts have names."""
    causal = check_model(model, CausalLM, "generate")
    check_positive(max_tokens=max_tokens)
    sampling = checked_sampling(sampling)
    if stop_token is not None:
        token_ids("stop_token", [stop_token], causal.config.vocab_size)
    new = max_tokens - 1  # the model never reads the last one
    starts = [
        (checked_prompt(causal, name, prompt, state, new), state)
        for (name, prompt), state in zip(prompts.items(), states, strict=True)
    ]
    return causal, starts, sampling
