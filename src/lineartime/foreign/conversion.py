"""Convert files of other packages into a folder that all commands read."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.checkpoint import write_model
from lineartime.data.tokenizers import Tokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import check_names
from lineartime.files import new_folder, read_plain
from lineartime.foreign.flash_pytorch import from_flash_pytorch, is_model
from lineartime.foreign.gau_alpha import MODEL_TYPE, VOCABULARY, from_gau_alpha, read_vocabulary
from lineartime.foreign.weights import SUFFIXES, read_weights
from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM

_CONFIG = "config.json"
_HEADS = ("classifier.", "qa_outputs.")
"""The beginnings of the names of weights that fine-tuning of GAU-alpha adds."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SPECIAL = 2
"""How many special tokens (end of document, mask) the tokenizer may have that the model has not learned."""
_NEVER = -1e4
"""The logit of a token that a model has not learned, and so never predicts."""


def is_foreign(source: str | Path) -> bool:
    """Whether the source is a weight file, or a folder of GAU-alpha that holds a language model, not a fine-tuned one."""
    return _class_of(Path(source)) == ""


def fine_tuned_class(source: str | Path) -> str | None:
    """The class of a fine-tuned model of GAU-alpha, such as "GAUAlphaForTokenClassification"; None of any other source."""
    return _class_of(Path(source)) or None


def _class_of(source: Path) -> str | None:
    """The class of a fine-tuned model of GAU-alpha; "" of other models of it, and of weight files; None of other sources."""
    with suppress(LineartimeError, OSError):  # whoever reads the folder next reports it
        if source.is_file():
            return "" if source.suffix in SUFFIXES else None
        if (source / _CONFIG).is_file() and (config := read_plain(source / _CONFIG)).get("model_type") == MODEL_TYPE:
            names = config.get("architectures")
            name = str(names[0]) if isinstance(names, list) and names else ""
            return name if name.startswith("GAUAlphaFor") and name != "GAUAlphaForMaskedLM" else ""
    return None


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    flash_pytorch: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model of another package in the format of lineartime; returns the destination.

    Args:
        source: the folder of GAU-alpha, or a file with the state dict of a FLASHTransformer of FLASH-pytorch.
        destination: a new folder.
        tokenizer: the tokenizer that the model was trained with; GAU-alpha brings its own.
        flash_pytorch: keyword arguments of `from_flash_pytorch` that cannot be inferred from the weights.

    Raises:
        ArgumentError: for arguments that do not fit the source, or a destination that is not empty.
        LineartimeError: for a source that is damaged or not supported.
    """
    source, destination = Path(source), Path(destination)
    with new_folder("destination", destination) as partial:
        if source.is_file():
            model, tokenizer = _read_flash_pytorch(source, tokenizer, flash_pytorch or {})
        elif (tuned := fine_tuned_class(source)) is not None:
            raise LineartimeError(f"{source} holds a {tuned}, with a head: lineartime.hf.convert converts it.")
        elif is_foreign(source):
            for name, value in (("tokenizer", tokenizer), ("flash_pytorch", flash_pytorch)):
                if value:
                    what = f"is given, but {source} holds a model of GAU-alpha, which needs none: leave it out."
                    raise ArgumentError(name, what)
            model, tokenizer, _ = read_gau_alpha(source)
        else:
            what = "holds no model of another package: give a folder of GAU-alpha, or the weights of FLASH-pytorch."
            raise LineartimeError(f"{source} {what}")
        write_model(partial, model, tokenizer)
    return destination


def read_gau_alpha(source: Path) -> tuple[LanguageModel, Tokenizer, dict[str, Tensor]]:
    """The model and the tokenizer of a folder of GAU-alpha, and the weights of the head of a fine-tuned one.

    Raises:
        LineartimeError: for a folder that is damaged, or a model that ours cannot be.
    """
    file = next((source / name for name in _WEIGHTS if (source / name).is_file()), None)
    if file is None or not (source / VOCABULARY).is_file():
        missing = VOCABULARY if file else " or ".join(_WEIGHTS)
        raise LineartimeError(f"{source} holds a {_CONFIG} of GAU-alpha, but no {missing}: copy all files of the model.")
    weights, tuned = read_weights(file), fine_tuned_class(source) is not None
    head = {name: weights.pop(name) for name in sorted(weights) if tuned and name.startswith(_HEADS)}
    model = from_gau_alpha(weights, read_plain(source / _CONFIG))
    written = source / "tokenizer_config.json"
    lowercase = read_plain(written).get("do_lower_case", True) if written.is_file() else True
    tokenizer = read_vocabulary(source / VOCABULARY, lowercase is not False)
    if tokenizer.vocab_size != model.config.vocab_size:
        sizes = f"has {tokenizer.vocab_size:,} pieces, but the model has {model.config.vocab_size:,}"
        raise LineartimeError(f"{source / VOCABULARY} {sizes}: copy both from one model.")
    return model, tokenizer, head


def _read_flash_pytorch(
    source: Path, tokenizer: Tokenizer | None, arguments: Mapping[str, Any]
) -> tuple[LanguageModel, Tokenizer]:
    weights = read_weights(source)
    if not is_model(weights):
        what = "holds no FLASHTransformer of FLASH-pytorch: use lineartime.foreign.from_flash_pytorch for its layers alone."
        raise LineartimeError(f"{source} {what}")
    known = inspect.signature(from_flash_pytorch).parameters
    check_names(arguments, [name for name in known if name != "weights"], "FLASH-pytorch")
    if tokenizer is None:
        raise ArgumentError("tokenizer", "is None, but must be given: weights of FLASH-pytorch come without one.")
    model = from_flash_pytorch(weights, **arguments)
    assert isinstance(model, CausalLM | MaskedLM)
    missing = tokenizer.vocab_size - model.config.vocab_size
    if not 0 <= missing <= _SPECIAL:
        sizes = f"has {tokenizer.vocab_size:,} tokens, but the model {model.config.vocab_size:,}"
        raise ArgumentError("tokenizer", f"{sizes}: give the one that it was trained with.")
    state = model.state_dict()
    for name, value in (("backbone.embedding.weight", 0.0), ("lm_head.weight", 0.0), ("lm_head.bias", _NEVER)):
        rows: Tensor = state[name]
        state[name] = torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])
    wider = type(model)(model.config.override(vocab_size=tokenizer.vocab_size)).to(state["lm_head.bias"].dtype)
    wider.load_state_dict(state)
    return wider, tokenizer
