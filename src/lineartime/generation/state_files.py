"""Files of what a model remembers of a text."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError, first_line, reporting_file_errors
from lineartime.fields import check_type
from lineartime.files import new_file, os_error_behind, utf8_path
from lineartime.generation.prompts import LAST, PromptState, check_prompt_state, checked_prompt, token_ids
from lineartime.models.backbone import ModelState
from lineartime.models.language_model import CausalLM, LanguageModel, check_model
from lineartime.ops.state import State

_FORMAT = "lineartime prompt state 2"
_MOST = 2**53
"""More than the tokens of any text; positions are also computed in float64."""


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
    parts: dict[str, Any] = {"logits": state.logits}
    _mapped(state.state.blocks, parts.setdefault)
    numbers = {name: part for name, part in parts.items() if isinstance(part, int)}
    tensors = {name: part.detach().cpu().contiguous().clone() for name, part in parts.items() if isinstance(part, Tensor)}
    known = {"numbers": numbers, "last": state.last}
    facts = {**known, "model": _digest_of_model(causal), "dtype": _dtype(causal), "contents": _digest(known, tensors)}
    with new_file("path", Path(path)) as partial, utf8_path(partial) as file:
        try:
            save_file(tensors, file, {"format": _FORMAT, "facts": json.dumps(facts)})
        except SafetensorError as error:
            raise os_error_behind(error) from None


def load_state(model: LanguageModel, path: str | Path) -> PromptState:
    """Read what a model remembers of a text, on the device of the model. No code in the file is run.

    Args:
        model: the model that read the text, with the same weights.
        path: a file of `save_state`.

    Raises:
        ArgumentError: for a state of other weights.
        LineartimeError: for a file that is missing, damaged, or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    check_type("path", path, str | Path)
    causal, file = check_model(model, CausalLM, "continue a text"), Path(path)
    device = next(causal.parameters()).device
    try:
        with reporting_file_errors("read", file):
            file.open("rb").close()  # safetensors names neither the file nor the reason
        with utf8_path(file) as readable, safe_open(readable, framework="pt") as opened:
            metadata: Mapping[str, str] = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is not a dict
    except SafetensorError as error:
        raise _damaged(file, first_line(error)) from None
    if metadata.get("format") != _FORMAT:
        raise LineartimeError(f"{file} is no file of a state: give one that save_state wrote.")
    try:
        facts = json.loads(metadata["facts"])
        numbers, last, of_model, dtype, digest = (facts[name] for name in ("numbers", "last", "model", "dtype", "contents"))
        if not all(type(number) is int and 0 <= number < _MOST for number in numbers.values()):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(file, "its facts cannot be read") from None
    if _digest({"numbers": numbers, "last": last}, tensors) != digest:
        raise _damaged(file, "its contents differ from what was written")
    if dtype != _dtype(causal):
        found = f"is {file}, which a model with weights in {dtype} wrote, but these are in {_dtype(causal)}"
        raise ArgumentError("state", f"{found}: use the same precision.")
    if of_model != _digest_of_model(causal):
        raise ArgumentError("state", f"is {file}, which a model with other weights wrote: load it with that model.")
    try:
        ids = token_ids("last", last, causal.config.vocab_size)[-LAST:]
        logits = tensors.pop("logits").to(device)
        parts = {name: tensor.to(device) for name, tensor in tensors.items()} | numbers
        blocks = _mapped(causal.init_state(0).blocks, lambda name, _: parts[name])
        state = PromptState(ModelState(blocks), logits, ids)
        if any(len(tensor) != 1 for tensor in state.state.tensors()):
            raise ValueError
        checked_prompt(causal, "prompt", (), state)
        longest = causal.config.longest_sequence
        if longest is None or state.position < longest:
            with torch.no_grad():  # sizes that grow must fit each other, too
                causal.extend(torch.zeros(1, 1, dtype=torch.long, device=device), state.state.clone())
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError, OverflowError):
        raise _damaged(file, "it is not the state of a text that this model can read") from None
    return state


def _mapped(state: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """A state with a function of the name and value of each tensor and number. Names are paths of fields: "0.own.position"."""
    if isinstance(state, tuple):
        parts = [(str(place), part) for place, part in enumerate(state)]
    elif isinstance(state, State):
        parts = [(field.name, getattr(state, field.name)) for field in fields(cast("Any", state))]
    else:
        return None if state is None else function(name, state)
    made = [_mapped(part, function, f"{name}.{field}" if name else field) for field, part in parts]
    return tuple(made) if isinstance(state, tuple) else type(state)(*made)


def _digest(facts: Any, tensors: Mapping[str, Tensor]) -> str:
    """A digest of facts in JSON and of tensors. Quantised ones, for instance, consist of several plain ones."""
    found = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        for inner, plain in _plain(name, tensors[name].detach()):
            found.update(f"{inner} {plain.dtype} {list(plain.shape)}".encode())
            found.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of which a tensor consists: those of a subclass, by PyTorch's protocol for them."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor
        return
    for inner in flatten()[0]:
        yield from _plain(f"{name}.{inner}", getattr(tensor, inner))


def _digest_of_model(model: CausalLM) -> str:
    """A digest of the config and the weights, without which a state means nothing."""
    return _digest(model.config.to_dict(), model.state_dict())


def _dtype(model: CausalLM) -> str:
    """The dtype of the weights: "float32"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def _damaged(file: Path, why: str) -> LineartimeError:
    return LineartimeError(f"{file} is damaged ({why}): read the prompt again, and save its state.")
