"""Reading prompts: once, in parallel, and in pieces, so that memory does not grow with the prompt.

Shapes: B texts, N tokens of a prompt, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.generation.ids import Ids, token_ids
from lineartime.models.backbone import ModelState
from lineartime.models.language_model import CausalLM, LanguageModel, check_model

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
    """The ids of a prompt, which may be empty if there is a state.

    Args:
        model: the model that is to read it.
        argument: the name of the prompt in messages.
        prompt: the ids.
        state: of the text before.
        more: the number of tokens to read after the prompt.

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
    device = next(model.parameters()).device
    if state.logits.device != device:
        raise ArgumentError("state", f"is on {state.logits.device}, but the model is on {device}: read the prompt there.")


def read(model: CausalLM, ids: Sequence[int], state: PromptState | None = None) -> PromptState:
    """`read_prompt` of checked ids; without ids, the state as it is."""
    torch.clear_autocast_cache()  # an autocast of the caller keeps copies of weights that training has changed since
    if not ids:
        assert state is not None
        return state
    device = next(model.parameters()).device
    with torch.no_grad():
        logits, read_state = prefill_batch(
            model, torch.tensor([ids], device=device), None if state is None else state.state.clone()
        )
    before = () if state is None else state.last
    return PromptState(read_state, logits[0], (*before, *ids)[-LAST:])


def prefill_batch(model: CausalLM, ids: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
    """Read ids [B, N], the beginning of streams or, with their `state`, which is consumed, more of them.

    Returns the last logits [B, V], and the state.

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
