"""Reading prompts: once, in parallel, and in pieces, so that memory does not grow with the prompt; and files of what was read.

Shapes: B texts, N tokens of a prompt, V vocabulary.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors, typed_first_line
from lineartime.fields import check_type, shown
from lineartime.files import new_file, os_error_behind
from lineartime.models.backbone import ModelState
from lineartime.models.language_model import CausalLM, LanguageModel, check_model
from lineartime.ops.state import leaves, rebuilt

Ids = Iterable[int] | Tensor
"""Token ids: any sequence of integers, a numpy array [N], or a tensor [N]."""
PREFILL = {"cpu": 1024, "cuda": 16_384}
"""Tokens of a prompt that a causal model reads at a time, by device: memory does not grow with the prompt beyond that."""
LAST = 16
"""The number of last tokens that a state remembers: the text of the next token can depend on them."""
_FORMAT = "lineartime prompt state 2"
"""What a file of a state calls itself."""


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
    try:
        ids = torch.as_tensor(given.tolist() if hasattr(given, "tolist") else list(given), device="cpu")
    except (TypeError, ValueError, RuntimeError):  # of a text, for instance, or of something that is no sequence
        what = "must be integers, the token ids of one text: encode a text with the model's tokenizer"
        raise ArgumentError(argument, f"is {shown(given)}, but {what}.") from None
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 1 or (len(ids) and not whole):
        found = f"has shape {list(ids.shape)} and dtype {ids.dtype}"
        raise ArgumentError(argument, f"{found}, but must be the token ids of one text, integers [N].")
    numbers = tuple(map(int, ids.tolist()))
    for number in numbers:
        if not 0 <= number < vocab_size:
            has = f"this model's vocabulary has {vocab_size:,} tokens: ids are from 0 to {vocab_size - 1}"
            raise ArgumentError(argument, f"holds the id {number}, but {has}.")
    return numbers


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


def save_state(model: LanguageModel, state: PromptState, path: str | Path) -> None:
    """Write what a model remembers of a text to a file in the format of safetensors, which `load_state` reads.

    Args:
        model: the model that read the text.
        state: as `read_prompt` returns it.
        path: a new file.

    Raises:
        ArgumentError: for a file that exists, or a state of another model.
        LineartimeError: if the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_type("path", path, str | Path)
    causal = check_model(model, CausalLM, "continue a text")
    check_prompt_state(causal, state)
    parts: dict[str, Any] = {"logits": state.logits, **dict(leaves(state.state.blocks))}
    numbers = {name: part for name, part in parts.items() if isinstance(part, int)}
    tensors = {name: part.detach().cpu().contiguous().clone() for name, part in parts.items() if isinstance(part, Tensor)}
    facts = {"numbers": numbers, "last": state.last, "model": _digest(causal)}
    with new_file("path", Path(path)) as file:
        try:
            save_file(tensors, file, {"format": _FORMAT, "facts": json.dumps(facts)})
        except SafetensorError as error:
            raise os_error_behind(error) from None


def load_state(model: LanguageModel, path: str | Path) -> PromptState:
    """Read what a model remembers of a text, on the device of the model. No code in the file is run.

    Args:
        model: the model that read the text, with the same weights in the same precision.
        path: a file of `save_state`.

    Raises:
        ArgumentError: for a state of other weights.
        LineartimeError: for a file that is missing, damaged, or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    check_type("path", path, str | Path)
    causal, file = check_model(model, CausalLM, "continue a text"), Path(path)
    device, like = next(causal.parameters()).device, causal.init_state(0).blocks
    try:
        with reporting_file_errors("read", file):
            file.open("rb").close()  # safetensors names neither the file nor the reason
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise LineartimeError(f"{file} is no file of a state: give one that save_state wrote.")
            parts = {name: opened.get_tensor(name).to(device) for name in opened.keys()}  # noqa: SIM118  # it is not a dict
        facts = json.loads(metadata["facts"])
        if facts["model"] != _digest(causal):
            wrote = "which a model with other weights, or in another precision, wrote: load it with that model"
            raise ArgumentError("state", f"is {file}, {wrote}.")
        parts |= facts["numbers"]
        made = (None if part is None else parts[name] for name, part in leaves(like))
        return PromptState(ModelState(rebuilt(like, made)), parts["logits"], tuple(facts["last"]))
    except LineartimeError:
        raise
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise LineartimeError(
            f"{file} is damaged ({typed_first_line(error)}): read the prompt again, and save its state."
        ) from None


def _digest(model: CausalLM) -> str:
    """A digest of the config and the weights of a model, without which a state means nothing."""
    found = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
