"""Generation: read the prompt once, then extend the text token by token from the state; no token is read twice.

Texts can be continued together: from the first to the last token, or as a `TextBatch`, in which they begin and end at any step.

Shapes: N tokens of the prompt, B texts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation.decoding import Sampling, checked_sampling, draw, drawing, pick, seen_in, uniform_numbers
from lineartime.generation.prompts import Ids, PromptState, checked_prompt, load_state, read, read_prompt, save_state, token_ids
from lineartime.models.backbone import ModelState
from lineartime.models.language_model import CausalLM, LanguageModel, are_finite, check_finite_logits, check_model
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
    drawn = _drawn(model, {"prompt": prompt}, [state], max_tokens, sampling, stop_token)
    return takewhile(lambda token: token != stop_token, (token for (token,) in drawn))


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
    texts: list[list[int]] = [[] for _ in prompts]
    growing = set(range(len(prompts)))
    for tokens in _drawn(model, named, states, max_tokens, sampling, stop_token):
        growing -= {text for text in growing if tokens[text] == stop_token}
        for text in sorted(growing):
            texts[text].append(tokens[text])
            if ended is not None and ended(text, tokens[text]):
                growing.remove(text)
        if not growing:
            break
    return texts


def _drawn(
    model: object,
    prompts: Mapping[str, Ids],
    states: Sequence[PromptState | None],
    max_tokens: int,
    sampling: Sampling | None,
    stop_token: int | None,
) -> Iterator[list[int]]:
    """Check all arguments, of which prompts have names, and return an iterator over the next token of every text.

    It ends after `max_tokens` tokens; texts that have ended are continued, too.
    """
    causal = check_model(model, CausalLM, "generate")
    check_positive(max_tokens=max_tokens)
    how = checked_sampling(sampling)
    if stop_token is not None:
        token_ids("stop_token", [stop_token], causal.config.vocab_size)
    new = max_tokens - 1  # the model never reads the last one
    starts = [
        (checked_prompt(causal, name, prompt, state, new), state)
        for (name, prompt), state in zip(prompts.items(), states, strict=True)
    ]

    def draw_all() -> Iterator[list[int]]:
        generator = how.generator()
        seen = seen_in([ids for ids, _ in starts], causal.config.vocab_size, how)
        once = {start: read(causal, *start) for start in dict.fromkeys(starts)}
        tokens = draw(torch.stack([once[start].logits for start in starts]), how, generator, seen)
        yield _on_host(tokens)
        if max_tokens == 1:  # there may be no position for another one
            return
        with torch.no_grad():
            state = State.concatenate([once[start].state for start in starts])  # in memory of its own
            draw_next = drawing(causal, state, how, generator, seen)
        del once, state  # the state of a long prompt may be large
        for _ in range(1, max_tokens):
            with torch.no_grad():
                tokens = draw_next(tokens)
            yield _on_host(tokens)

    return draw_all()


def _on_host(drawn: Tensor) -> list[int]:
    """Drawn tokens as numbers. Raises LineartimeError if the logits were not finite."""
    tokens: list[int] = drawn.tolist()
    check_finite_logits(min(tokens, default=0) >= 0)
    return tokens


@dataclass
class _Text:
    """A text of a batch."""

    position: int  # the number of tokens read
    state: ModelState | None  # what the model remembers; None while it is in the state of the batch
    logits: Tensor | None  # [V], after the last token read; None if a drawn token is to be read first
    sampling: Sampling  # how to draw, without the seed
    generator: torch.Generator
    seen: Tensor | None  # its tokens, bool [1, V], if repetitions are penalised
    token: int = -1  # the one drawn last


class TextBatch:
    """Continues texts together, one token of each per step. Texts are added and removed between steps.

    With a state of constant size, as that of FLASH, a step takes the same time and memory however long the texts are. When
    texts were added or removed, the next step copies all states once. The batch takes the weights as they are when it is made.

    Args:
        model: a causal language model, in evaluation mode.
        sampling: how to draw for texts that are added without a sampling of their own. One generator draws for all of them, so
            that what is drawn for one depends on the others.

    Raises:
        ArgumentError: for an argument of the wrong type.
    """

    def __init__(self, model: LanguageModel, sampling: Sampling | None = None) -> None:
        self._model = check_model(model, CausalLM, "generate")
        self._longest = self._model.config.longest_sequence
        self._sampling = checked_sampling(sampling)
        self._generator = self._sampling.generator()
        self._decoder = self._model.compile_for_decoding()
        self._texts: dict[int, _Text] = {}
        self._added = 0
        self._joined: list[int] = []  # the texts whose states are in that of the batch
        self._state: ModelState | None = None

    def __len__(self) -> int:
        """The number of texts, B."""
        return len(self._texts)

    def add(self, prompt: Ids, state: PromptState | None = None, sampling: Sampling | None = None) -> int:
        """Read a prompt, and continue it from the next step on.

        Args:
            prompt: token ids; at least one without a `state`.
            state: of a text before the prompt, as `read_prompt` returns it; it is not modified.
            sampling: how to draw for this text, by a generator of its own: with a seed, the text is that of `generate`,
                whatever else is in the batch, up to the rounding of logits. The default is the sampling of the batch.

        Returns:
            The number of the text; no two texts of a batch have the same.

        Raises:
            ArgumentError: as `read_prompt`.
        """
        how = self._sampling if sampling is None else checked_sampling(sampling)
        generator = self._generator if sampling is None else how.generator()
        ids = checked_prompt(self._model, "prompt", prompt, state)
        read_so_far = read(self._model, ids, state)
        number, self._added = self._added, self._added + 1
        seen = seen_in([ids], self._model.config.vocab_size, how)
        start = read_so_far.position, read_so_far.state, read_so_far.logits
        self._texts[number] = _Text(*start, replace(how, seed=None), generator, seen)
        return number

    def remove(self, number: int) -> None:
        """End a text. Raises ArgumentError unless it is in the batch."""
        if not isinstance(number, int) or number not in self._texts:
            raise ArgumentError("number", f"is {number!r}, but must be that of a text in this batch, as `add` returned it.")
        del self._texts[number]
        if not self._texts:  # their memory may be large
            self._joined, self._state = [], None

    def step(self) -> dict[int, int]:
        """Draw the next token of every text: tokens by the number of the text.

        After an error about one text, the next step goes on with the others, if that one is removed.

        Raises:
            ArgumentError: if a text is as long as the model can read.
            LineartimeError: if the logits of a text are not finite.
        """
        if not self._texts:
            return {}
        with torch.no_grad():
            self._read_drawn()
            logits = torch.stack([text.logits for text in self._texts.values() if text.logits is not None])
            for number, finite in zip(self._texts, are_finite(logits).tolist(), strict=True):
                if not finite:
                    raise LineartimeError(f"The logits of text {number} are not finite: remove it from the batch.")
            self._draw(logits.float().cpu())
        return {number: text.token for number, text in self._texts.items()}

    def _read_drawn(self) -> None:
        """Read the tokens that were drawn last, and keep the logits after each."""
        texts = {number: text for number, text in self._texts.items() if text.logits is None}
        for number, text in texts.items():
            if self._longest is not None and text.position >= self._longest:
                what = f"is a text of {self._longest} tokens, the most this model reads: remove it."
                raise ArgumentError("number", f"{number} {what}")
        if not texts:
            return
        if self._joined != list(texts):  # its state is now that of the texts that are in it, then of those that were added
            states = [text.state for text in texts.values() if text.state is not None]
            rows = [row for row, number in enumerate(self._joined) if number in self._texts]
            if self._state is not None and rows:
                states = [self._state.take(torch.tensor(rows, device=self._state.position.device)), *states]
            self._state, self._joined = State.concatenate(states), list(texts)
            for text in texts.values():
                text.state = None
        assert self._state is not None
        tokens = torch.tensor([text.token for text in texts.values()], device=next(self._model.parameters()).device)
        logits, self._state = self._decoder.extend(tokens, self._state)
        for text, of_text in zip(texts.values(), logits, strict=True):
            text.position, text.logits = text.position + 1, of_text

    def _draw(self, logits: Tensor) -> None:
        """Draw a token of every text, by logits [B, V], in one operation for all texts with the same sampling."""
        texts = list(self._texts.values())
        uniform = torch.cat([uniform_numbers(1, text.generator) for text in texts])
        for sampling in dict.fromkeys(text.sampling for text in texts):
            rows = [row for row, text in enumerate(texts) if text.sampling == sampling]
            seen = [tokens for row in rows if (tokens := texts[row].seen) is not None]
            of_rows = logits if len(rows) == len(texts) else logits[rows]
            drawn = pick(of_rows, sampling, uniform[rows], torch.cat(seen) if seen else None)
            for text, token in zip([texts[row] for row in rows], drawn.tolist(), strict=True):
                text.token, text.logits = token, None
                if text.seen is not None:
                    text.seen[0, token] = True
