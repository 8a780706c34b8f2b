"""Generation: read the prompt once, then extend the text token by token from the state; no token is read twice.

Shapes: N tokens of the prompt, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import index
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.generation.sampling import Sampling, chosen, draw
from lineartime.generation.streams import drawing, prefill
from lineartime.models.language_model import CausalLM, LanguageModel, check_finite_logits, check_model
from lineartime.ops.checks import check_positive

__all__ = ["Ids", "Sampling", "chosen", "generate", "generate_batch", "token_ids"]

Ids = Iterable[int] | Tensor
"""Token ids: any sequence of integers, a numpy array [N], or a tensor [N]."""


def generate(
    model: LanguageModel, prompt: Ids, max_tokens: int, sampling: Sampling | None = None, stop_token: int | None = None
) -> Iterator[int]:
    """Continue a prompt, and yield each token as soon as it is drawn.

    Args:
        model: a causal language model, in evaluation mode; one of task "prefix-lm" reads the prompt as its prefix.
        prompt: token ids, at least one: a sequence, a numpy array [N] or a tensor [N].
        max_tokens: the maximum number of tokens to draw.
        sampling: how to draw them; the default is `Sampling()`.
        stop_token: a token that ends the text; it is not yielded.

    Raises:
        ArgumentError: for an empty prompt, an id outside the vocabulary, more tokens than the model can read, or an argument
            of the wrong type.
    """
    causal, (ids,), sampling = _checked(model, {"prompt": prompt}, max_tokens, sampling, stop_token)
    drawn = (token for (token,) in _drawn(causal, [ids], max_tokens, sampling))
    return takewhile(lambda token: token != stop_token, drawn)


def _drawn(model: CausalLM, prompts: Sequence[tuple[int, ...]], max_tokens: int, sampling: Sampling) -> Iterator[list[int]]:
    """Yield the next token of every text, `max_tokens` times. Texts that have ended are continued, too."""
    generator = sampling.generator()
    with torch.no_grad():
        once = {ids: prefill(model, ids) for ids in dict.fromkeys(prompts)}
        logits = torch.stack([once[ids][0] for ids in prompts])
        tokens = draw(logits, sampling, generator)
    yield _on_host(tokens)
    if max_tokens == 1:  # there may be no position for another one
        return
    with torch.no_grad():
        draw_next = drawing(model, [once[ids][1] for ids in prompts], sampling, generator)
    del once  # the state of a long prompt may be large
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
) -> list[list[int]]:
    """Continue several prompts of any lengths together. The probabilities of a text do not depend on the other prompts.

    The model reads each prompt by itself, and equal prompts only once. Every step then adds a token to each text. A model that
    `steps_in_place`, such as FLASH, computes all texts at once, in constant time and memory per step, on a GPU as a CUDA
    graph. Softmax attention and GAU compute all texts at once, too, with memory that grows. Other models compute the texts of
    equally long prompts at once, one group after another.

    Args:
        model: a causal language model, in evaluation mode.
        prompts: token ids, at least one in each.
        max_tokens, sampling, stop_token: as for `generate`; one generator draws for all texts, so that what is drawn for a text
            depends on the other prompts.
        ended: called with the number of a text and its new token; the text ends with this token if it returns True.

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
    named = {f"prompts[{index}]": prompt for index, prompt in enumerate(prompts)}
    causal, ids, sampling = _checked(model, named, max_tokens, sampling, stop_token)
    texts: list[list[int]] = [[] for _ in prompts]
    growing = set(range(len(prompts)))
    for tokens in _drawn(causal, ids, max_tokens, sampling):
        growing -= {text for text in growing if tokens[text] == stop_token}
        for text in sorted(growing):
            texts[text].append(tokens[text])
            if ended is not None and ended(text, tokens[text]):
                growing.remove(text)
        if not growing:
            break
    return texts


def _checked(
    model: object, prompts: Mapping[str, Ids], max_tokens: int, sampling: Sampling | None, stop_token: int | None
) -> tuple[CausalLM, list[tuple[int, ...]], Sampling]:
    """The model, the ids of each prompt, and how to draw. Raises ArgumentError for invalid arguments; prompts have names."""
    causal = check_model(model, CausalLM, "generate")
    known = causal.config
    check_positive(max_tokens=max_tokens)
    sampling = chosen(sampling)
    if stop_token is not None:
        token_ids("stop_token", [stop_token], known.vocab_size)
    found = {name: token_ids(name, prompt, known.vocab_size) for name, prompt in prompts.items()}
    longest = known.longest_sequence
    for name, ids in found.items():
        if not ids:
            raise ArgumentError(name, "is empty, but must hold at least one token, for instance the end of a document.")
        tokens = len(ids) + max_tokens - 1  # the model never reads the last one
        if longest is not None and tokens > longest:
            raise ArgumentError(
                "max_tokens",
                f"is {max_tokens} after a prompt of {len(ids)} tokens, which makes {tokens} tokens to read, but this model "
                f"reads at most {longest}: ask for fewer, or shorten the prompt.",
            )
    return causal, list(found.values()), sampling


def token_ids(argument: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    """Convert token ids to integers. Raises ArgumentError, naming the argument and the id, for anything else.

    Args:
        argument: the name of the argument.
        given: a sequence of integers, a numpy array [N] or a tensor [N].
        vocab_size: the ids must be below this.
    """
    if isinstance(given, str):
        raise ArgumentError(argument, "is a text, but must be token ids: encode it with the model's tokenizer.")
    if getattr(given, "ndim", 1) != 1:
        raise ArgumentError(argument, f"has shape {list(given.shape)}, but must be the token ids of one text, [N].")
    try:
        values = given.tolist() if hasattr(given, "tolist") else list(given)
    except TypeError:
        raise ArgumentError(argument, f"is {given!r}, but must be a sequence of token ids.") from None
    ids = []
    for value in values:
        try:
            if isinstance(value, bool):
                raise TypeError
            ids.append(index(value))
        except TypeError:
            raise ArgumentError(argument, f"holds {value!r}, but must hold token ids, which are integers.") from None
        if not 0 <= ids[-1] < vocab_size:
            raise ArgumentError(
                argument,
                f"holds the id {value}, but this model's vocabulary has {vocab_size:,} tokens: ids are from 0 to "
                f"{vocab_size - 1}.",
            )
    return tuple(ids)
