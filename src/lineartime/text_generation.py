"""Text in, text out: a model continues a text until a stop text, the end of the document or enough tokens, or fills its gaps.

Shapes: T tokens of a text, M masks, V vocabulary, K candidates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from lineartime.data.tokenizers import MASK_TEXT, Tokenizer, check_vocabulary, encode_given
from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_type
from lineartime.generation import PromptState, Sampling, generate, generate_batch
from lineartime.generation.decoding import likeliest
from lineartime.generation.prompts import LAST
from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM, are_finite, check_finite_logits, check_model
from lineartime.ops.checks import check_positive

Ending = Literal["stop", "end_of_document", "max_tokens"]


@dataclass(frozen=True)
class Continuation:
    """What a model generated after a prompt.

    Attributes:
        text: the generated text, without the prompt, the stop text and anything after it.
        tokens: the number of tokens drawn, not counting an end of document.
        ended_by: what ended the text.
    """

    text: str
    tokens: int
    ended_by: Ending


def generate_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    state: PromptState | None = None,
) -> Iterator[str]:
    """Continue a text, and yield its pieces as soon as they are final.

    Args:
        model: a causal language model, in evaluation mode.
        tokenizer: the model's tokenizer.
        prompt: the text to continue; an empty one begins a new document, or continues that of `state`.
        max_tokens: the maximum number of tokens to draw.
        sampling: how to draw them; the default is `Sampling()`.
        stop: texts that end the continuation, regardless of token boundaries. The one that is completed first counts. It is
            left out, and no piece holds a part of it. The prompt is not searched.
        state: of a text before the prompt, as `lineartime.read_prompt` returns it; it is not modified.

    Raises:
        ArgumentError: as for `generate`, and for a tokenizer that does not fit the model, or an empty stop text.
    """
    ids, stops = _checked(model, tokenizer, prompt, stop, state)
    tokens = generate(model, ids, max_tokens, sampling, tokenizer.end_of_document, state)
    writing = _Writing(tokenizer, ids, state, stops)

    def pieces() -> Iterator[str]:
        for token in tokens:
            yield writing.push(token)
            if writing.is_stopped:
                return
        yield writing.flush()

    return filter(None, pieces())


def generate_samples(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    samples: int,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    state: PromptState | None = None,
) -> list[Continuation]:
    """Continue a text several times, in one batch.

    Args:
        model, tokenizer, prompt, max_tokens, stop, state: as for `generate_text`.
        samples: the number of continuations.
        sampling: how to draw; the same seed gives the same samples.

    Raises:
        ArgumentError: as for `generate_text`.
    """
    ids, stops = _checked(model, tokenizer, prompt, stop, state)
    check_type("samples", samples, Annotated[int, Between(1, 2**16)])
    writings = [_Writing(tokenizer, ids, state, stops) for _ in range(samples)]
    texts: list[list[str]] = [[] for _ in writings]  # a piece for each token

    def ended(number: int, token: int) -> bool:
        texts[number].append(writings[number].push(token))
        return writings[number].is_stopped

    generate_batch(model, [ids] * samples, max_tokens, sampling, tokenizer.end_of_document, ended, state)
    found = []
    for pieces, writing in zip(texts, writings, strict=True):
        text = "".join([*pieces, writing.flush()])
        ending: Ending = "stop" if writing.is_stopped else "max_tokens" if len(pieces) == max_tokens else "end_of_document"
        found.append(Continuation(text, len(pieces), ending))
    return found


class _Writing:
    """A continuation in progress: tokens in, text out, up to the stop text that is completed first."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], state: PromptState | None, stops: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        for token in (*(() if state is None else state.last), *prompt)[-LAST:]:  # the text of the next one can depend on them
            self._decoder.push(token)
        self._decoder.flush()
        self._stops = stops
        self._held = ""  # the end of the text so far, in which a stop text may have begun
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now certain to come before any stop text."""
        return self._certain(self._decoder.push(token))

    def flush(self) -> str:
        """The text that was held back, after the last token."""
        if self.is_stopped:
            return ""
        text = self._certain(self._decoder.flush())
        return text if self.is_stopped else text + self._held

    def _certain(self, new: str) -> str:
        text = self._held + new
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        self.is_stopped = bool(ends)
        begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        certain = min(ends)[1] if ends else len(text) - max(begun, default=0)
        self._held = text[certain:]
        return text[:certain]


def _checked(
    model: LanguageModel, tokenizer: Tokenizer, prompt: str, stop: str | Sequence[str], state: PromptState | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids of the prompt, and the stop texts. Raises ArgumentError for invalid arguments."""
    vocabulary = check_model(model, CausalLM, "generate").config.vocab_size
    check_vocabulary(tokenizer, vocabulary)
    if not isinstance(stop, (str, list, tuple)):
        raise ArgumentError("stop", f"is {stop!r}, but must be a text, or a list of texts.")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ArgumentError("stop", f"holds {text!r}, but must hold texts of at least one character.")
    return prompt_ids(tokenizer, prompt, state), stops


def prompt_ids(tokenizer: Tokenizer, prompt: str, state: PromptState | None) -> tuple[int, ...]:
    """The ids of a prompt. An empty one begins a new document, unless it continues the text of `state`."""
    inside = state is not None and state.last[-1:] != (tokenizer.end_of_document,)
    ids = tuple(encode_given(tokenizer, "prompt", prompt, inside))
    return ids or (() if state is not None else (tokenizer.end_of_document,))


@dataclass(frozen=True)
class Candidate:
    r"""A candidate for a masked token.

    Attributes:
        token: the token's id.
        text: the token in readable form; bytes of an incomplete character are written as \xc3.
        probability: the token's probability among all tokens of the vocabulary.
    """

    token: int
    text: str
    probability: float


def fill_mask(model: MaskedLM, tokenizer: Tokenizer, text: str, top: int = 5) -> list[list[Candidate]]:
    """Predict the likeliest tokens at each [MASK] of a text.

    A mask replaces one token; with a byte tokenizer, one byte. The model reads all masks at once, and predicts each without
    knowing the tokens at the others. The parts of the text between masks are encoded separately.

    Args:
        model: a masked language model, in evaluation mode.
        tokenizer: the model's tokenizer.
        text: the text, with at least one "[MASK]".
        top: K, the number of candidates.

    Returns:
        For each of the M masks in order, K candidates, the likeliest first.

    Raises:
        ArgumentError: for a text without a mask or longer than the model can read, a causal model, or a tokenizer that does
            not fit the model.
        LineartimeError: if the logits are not finite.
    """
    known = check_model(model, MaskedLM, "fill masks").config
    check_vocabulary(tokenizer, known.vocab_size)
    check_positive(top=top)
    ids = _masked_ids(tokenizer, text)
    longest = known.longest_sequence
    if longest is not None and len(ids) > longest:
        raise ArgumentError("text", f"has {len(ids):,} tokens, but this model reads at most {longest:,}: shorten it.")
    places = [place for place, token in enumerate(ids) if token == tokenizer.mask]
    device = next(model.parameters()).device
    torch.clear_autocast_cache()  # an autocast of the caller keeps copies of weights that training has changed since
    with torch.no_grad():
        hidden = model.backbone(torch.tensor([ids], device=device))[0, places]
        logits = model.logits(hidden).float()  # [M, V]
    check_finite_logits(bool(are_finite(logits).all()))
    tokens = likeliest(logits, min(top, known.vocab_size))
    values = logits.softmax(-1).gather(-1, tokens)
    return [
        [Candidate(token, tokenizer.show(token), value) for token, value in zip(ids, chances, strict=True)]
        for ids, chances in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


def _masked_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text as in training, with each [MASK] as the mask token. Raises ArgumentError if it has none."""
    if not isinstance(text, str):
        raise ArgumentError("text", f"is of type {type(text).__name__}, but must be a text.")
    if MASK_TEXT not in text:
        beginning = text if len(text) <= 40 else f"{text[:37]}..."
        raise ArgumentError("text", f"is {beginning!r}, which holds no {MASK_TEXT}: write {MASK_TEXT} at each gap.")
    first, *rest = (encode_given(tokenizer, "text", part, place > 0) for place, part in enumerate(text.split(MASK_TEXT)))
    ids = [*first, *(token for part in rest for token in (tokenizer.mask, *part))]
    return ids if tokenizer.frame is None else [tokenizer.frame[0], *ids, tokenizer.frame[1]]
