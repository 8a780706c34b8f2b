"""Reading prompts: once, in parallel, and in pieces, so that memory does not grow with the prompt.

Shapes: B texts, N tokens of a prompt, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.models.backbone import ModelState
from lineartime.models.language_model import CausalLM, LanguageModel, check_model

Ids = Iterable[int] | Tensor
"""Token ids: any sequence of integers, a numpy array [N], or a tensor [N]."""
PREFILL = {"cpu": 1024, "cuda": 16_384}
"""Tokens of a prompt that a causal model reads at a time, by device: memory does not grow with the prompt beyond that."""
LAST = 16
"""The number of last tokens that a state remembers: the text of the next token can depend on them."""


@dataclass(frozen=True, eq=False)
class PromptState:
    """What a model remembers of a text. Any number of continuations can begin with it; none modifies it.

    Attributes:
        state: the state of each block. Its size is constant for FLASH, and grows with the text for softmax attention and GAU.
        logits: [V], after the last token.
        last: the last tokens of the text, at most `LAST`.
    """

    state: ModelState
    logits: Tensor
    last: tuple[int, ...]

    @property
    def position(self) -> int:
        """The number of tokens that were read."""
        return int(self.state.position)


def read_prompt(model: LanguageModel, prompt: Ids, state: PromptState | None = None) -> PromptState:
    """Read a text, or more of one, once: `generate` and the other functions of generation continue it by `state=`.

    Args:
        model: a causal language model, in evaluation mode; one of task "prefix-lm" reads a text without `state` as its prefix.
        prompt: token ids, at least one: a sequence, a numpy array [N] or a tensor [N].
        state: of the text before, as this function returned it; it is not modified.

    Raises:
        ArgumentError: for an empty prompt, an id outside the vocabulary, more tokens than the model can read, a state of
            another model, or an argument of the wrong type.
    """
    causal = check_model(model, CausalLM, "generate")
    ids = checked_prompt(causal, "prompt", prompt, state)
    if not ids:
        raise ArgumentError("prompt", "is empty, but must hold at least one token.")
    return read(causal, ids, state)


def checked_prompt(model: CausalLM, argument: str, prompt: Ids, state: PromptState | None, more: int = 0) -> tuple[int, ...]:
    """The ids of a prompt, named `argument` in messages, after which `more` tokens are read. With a state, it may be empty.

    Raises:
        ArgumentError: as `read_prompt`.
    """
    ids = token_ids(argument, prompt, model.config.vocab_size)
    if state is not None:
        check_prompt_state(model, state)
    elif not ids:
        raise ArgumentError(argument, "is empty, but must hold at least one token, for instance the end of a document.")
    before = 0 if state is None else state.position
    tokens, longest = before + len(ids) + more, model.config.longest_sequence
    if longest is not None and tokens > longest:
        others = f" after {before} others" if before else ""
        most = f"{tokens} tokens to read, but this model reads at most {longest}"
        if not more:
            raise ArgumentError(argument, f"has {len(ids)} tokens{others}, which makes {most}: shorten it.")
        asked = f"is {more + 1} after a prompt of {len(ids)} tokens{others}"
        raise ArgumentError("max_tokens", f"{asked}, which makes {most}: ask for fewer, or shorten the prompt.")
    return ids


def token_ids(argument: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    """Convert token ids to integers. Raises ArgumentError, naming the argument, unless they are `Ids` below `vocab_size`."""
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


def check_prompt_state(model: CausalLM, state: object) -> None:
    """Raise ArgumentError unless `state` is the `PromptState` of a model like this one."""
    if not isinstance(state, PromptState):
        raise ArgumentError(
            "state", f"is of type {type(state).__name__}, but must be a PromptState, as read_prompt and load_state return it."
        )
    like = model.backbone.embedding.weight
    model.backbone.check_state(state.state, like.new_empty(1, 0, like.shape[1]))
    vocab_size = model.config.vocab_size
    if tuple(state.logits.shape) != (vocab_size,):
        found = f"has logits of shape {list(state.logits.shape)}, but the model has {vocab_size:,} tokens"
        raise ArgumentError("state", f"{found}: give a state of this model.")


def read(model: CausalLM, ids: Sequence[int], state: PromptState | None = None) -> PromptState:
    """`read_prompt` of checked ids; without ids, the state as it is."""
    torch.clear_autocast_cache()  # an autocast of the caller keeps copies of weights that training has changed since
    if not ids:
        assert state is not None
        return state
    begun, before = (None, ()) if state is None else (state.state.clone(), state.last)
    with torch.no_grad():
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        logits, read_state = prefill_batch(model, tokens, begun)
    return PromptState(read_state, logits[0], (*before, *ids)[-LAST:])


def prefill_batch(model: CausalLM, ids: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
    """Begin streams with ids [B, N], or continue those of a `state`, which is consumed: the last logits [B, V], and the state.

    A model of task "prefix-lm" reads the beginning as a prefix, all at once, and others in `pieces`.
    """
    if model.config.task == "prefix-lm" and state is None:
        hidden, state = model.backbone.read_prefix(ids)
        return model.logits(hidden[:, -1]), state
    state = model.init_state(ids.shape[0]) if state is None else state
    for piece in pieces(ids):
        hidden, state = model.backbone.extend(piece, state)
    return model.logits(hidden[:, -1]), state


def pieces(prompt: Tensor) -> Sequence[Tensor]:
    """A prompt [B, N, ...] in pieces of `PREFILL` tokens."""
    cut: Sequence[Tensor] = prompt.split(PREFILL.get(prompt.device.type, PREFILL["cpu"]), dim=1)
    return cut
