"""Conversion between folders of lineartime and folders of transformers."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging

from lineartime import checkpoint as checkpoints
from lineartime.checkpoint import CheckpointChoice
from lineartime.data.tokenizers import Tokenizer, read_definition
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import shown
from lineartime.files import TOKENIZER_FILE, DamagedFileError, new_folder, os_error_behind, read_plain
from lineartime.foreign.conversion import fine_tuned_class, read_gau_alpha
from lineartime.foreign.gau_alpha import PACKAGE
from lineartime.foreign.weights import StateDict, read_weights
from lineartime.hf import heads
from lineartime.hf.model import FIELDS, LineartimeConfig
from lineartime.hf.tokenizer import fast_tokenizer, plain_tokenizer
from lineartime.machine import shapes_only
from lineartime.models.config import ModelConfig
from lineartime.models.cost import model_tensors
from lineartime.models.language_model import LanguageModel, build_model

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
LOGITS, LOGITS_BIAS, EMBEDDING = "lm_head.weight", "lm_head.bias", "backbone.embedding.weight"
"""The output layer, which is a second name of the token embedding if they are tied, and the token embedding."""
PADDED = 128
"""Fewer rows than these after those of all tokens are taken for padding, to a multiple that is fast, and are left out."""
CARD = """---
library_name: transformers
pipeline_tag: {pipeline}
tags:
- lineartime
---

# {name}

A language model (task {task}) of {parameters:,} parameters, saved by lineartime: {blocks} blocks of {mixers}.

Transformers loads it where lineartime is installed; no remote code is run:

```python
import lineartime.hf  # registers the model with transformers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

`lineartime convert {name} DESTINATION` turns this folder back into one that the commands of lineartime read.
"""
_TUNED: dict[str, tuple[type[heads.TaskModel], str]] = {
    "GAUAlphaForSequenceClassification": (heads.LineartimeForSequenceClassification, "classifier"),
    "GAUAlphaForTokenClassification": (heads.LineartimeForTokenClassification, "classifier"),
    "GAUAlphaForQuestionAnswering": (heads.LineartimeForQuestionAnswering, "qa_outputs"),
}
"""The fine-tuned classes of GAU-alpha that ours can be, and the names of their heads."""


def convert(source: str | Path, destination: str | Path, *, checkpoint: CheckpointChoice | None = None) -> Path:
    """Convert a model: `to_transformers` for a run or checkpoint, `from_transformers` for a folder of transformers.

    A fine-tuned model of GAU-alpha is converted for transformers, with its head.
    Raises ArgumentError for a source that is neither, and the errors of these two functions.
    """
    source = Path(source)
    if checkpoint is None and (name := fine_tuned_class(source)) is not None:
        return _convert_fine_tuned(source, Path(destination), name)
    if checkpoints.list_checkpoints(source) or (checkpoints.is_checkpoint(source) and not (source / CONFIG).exists()):
        return to_transformers(source, destination, checkpoint=checkpoint)
    if not (source / CONFIG).exists():
        problem = "holds neither a run or checkpoint nor a model of transformers" if source.is_dir() else "is no folder"
        advice = "give the folder of a model, into which adapters have been merged"
        raise ArgumentError("source", f"is {source}, which {problem}: {advice}.")
    if checkpoint is not None:
        raise ArgumentError("checkpoint", f"is {checkpoint}, but {source} is no run: leave it out.")
    return from_transformers(source, destination)


def to_transformers(source: str | Path, destination: str | Path, *, checkpoint: CheckpointChoice | None = None) -> Path:
    """Save the model of a run or checkpoint for transformers: weights, configuration, tokenizer, and a model card.

    Of a run, `checkpoint` is "best" (the default), "last", or a step number. Returns the destination.

    Raises:
        ArgumentError: for a destination that is not empty.
        LineartimeError: if the model cannot be read, or the folder cannot be written.
    """
    destination = Path(destination)
    with new_folder("destination", destination) as folder:
        found, model, tokenizer = checkpoints.load_with_tokenizer(source, checkpoint=checkpoint)
        options = checkpoints.read_training_state(found).config if checkpoints.has_training_state(found) else {}
        end, masked = tokenizer.end_of_document, model.config.task == "mlm"
        config = LineartimeConfig.from_model_config(model.config, bos_token_id=end, eos_token_id=end, pad_token_id=end)
        longest = model.config.longest_sequence
        if length := longest or options.get("context_length"):
            config.n_positions = length  # what evaluation harnesses read; models themselves have no use for it
        with shapes_only():
            made = (heads.LineartimeForMaskedLM if masked else heads.LineartimeForCausalLM)(config)
        made.model.backbone = model.backbone
        if model.lm_head is not None:
            made.lm_head = model.lm_head
        made.tie_weights()
        with quietly():
            made.save_pretrained(folder)
            fast_tokenizer(tokenizer, longest, framed=masked).save_pretrained(folder)
        card = CARD.format(
            name=destination.name,
            pipeline="fill-mask" if masked else "text-generation",
            auto="AutoModelForMaskedLM" if masked else "AutoModelForCausalLM",
            task=model.config.task,
            parameters=model.n_parameters,
            blocks=model.config.n_blocks,
            mixers=", ".join(dict.fromkeys(mixer.kind for mixer in model.config.mixers)),
        )
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")  # the name may not be UTF-8
    return destination


@contextmanager
def quietly() -> Iterator[None]:
    """Show no progress bars, and turn errors of other libraries about a full disk into an OSError."""
    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or "os error" in str(error):  # the tokenizers library has no type for it
            raise os_error_behind(error) from None
        raise
    finally:
        if were_shown:
            logging.enable_progress_bar()


def _convert_fine_tuned(source: Path, destination: Path, name: str) -> Path:
    """Save a fine-tuned model of GAU-alpha, of the class `name`, with its head for transformers; raises LineartimeError."""
    theirs, problem = read_plain(source / CONFIG), None
    pooling = theirs.get("summary_type", "last") if name == "GAUAlphaForSequenceClassification" else None
    if name not in _TUNED:
        problem = f"holds a {name}, but only {', '.join(_TUNED)} can be converted"
    elif pooling not in (None, "first", "last", "mean") or (pooling and theirs.get("summary_activation")):
        only = "but only the first, last or mean vector can be converted"
        problem = f"has a summary with parts of its own before the head, {only}"
    if problem is not None:
        raise LineartimeError(f"{source} {problem}.")
    with new_folder("destination", destination) as folder:
        model, tokenizer, head = read_gau_alpha(source)
        (task, theirs_is), end, state = _TUNED[name], tokenizer.end_of_document, StateDict(head, PACKAGE)
        labels = {"num_labels": state.matrix(f"{theirs_is}.weight")[0]}
        labels |= {key: theirs[key] for key in ("id2label", "label2id", "problem_type") if theirs.get(key)}
        ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
        made = task(LineartimeConfig.from_model_config(model.config, **ids, **labels, pooling=pooling))
        made.model.backbone = model.backbone
        layer = getattr(made, made.head)
        layer.load_state_dict({key: state.take(f"{theirs_is}.{key}", *x.shape) for key, x in layer.state_dict().items()})
        state.finish()
        pairs = fast_tokenizer(tokenizer, framed=True)
        pairs.model_input_names = [*pairs.model_input_names, "token_type_ids"]  # that of the second of a pair is 1
        with quietly():
            made.save_pretrained(folder)
            pairs.save_pretrained(folder)
    return destination


def from_transformers(source: str | Path, destination: str | Path) -> Path:
    """Save a language model of transformers in the format of lineartime: a folder that `lineartime.load` and all commands read.

    The source is a folder written by `to_transformers`, or by `save_pretrained` of a language model of lineartime. Returns the
    destination.

    Raises:
        ArgumentError: for a destination that is not empty.
        LineartimeError: if the source is damaged, holds weights that are not finite, is not such a folder, or has a tokenizer
            that does not fit its model.
    """
    source, destination = Path(source), Path(destination)
    with new_folder("destination", destination) as partial:
        checkpoints.write_model(partial, *_read_model(source))
    return destination


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a model of ours for transformers. Raises LineartimeError if it is damaged, or of another model."""
    config = read_plain(folder / CONFIG)
    if config.get("model_type") != LineartimeConfig.model_type:
        what = f"describes a model of type {config.get('model_type')!r}"
        raise LineartimeError(f"{folder / CONFIG} {what}: only models of type 'lineartime' can be read.")
    return config


def _read_model(source: Path) -> tuple[LanguageModel, Tokenizer]:
    data = read_config(source)
    try:
        config = ModelConfig.from_dict({name: data[name] for name in FIELDS if name in data})
    except ValueError as error:
        raise LineartimeError(f"{source / CONFIG} describes no model that this version can build: {error}") from None
    state: dict[str, Tensor] = {}
    for file in _weight_files(source):
        state |= {name.removeprefix("model."): tensor for name, tensor in read_weights(file).items()}
    output, embedding = state.get(LOGITS), state.get(EMBEDDING)
    if output is not None and embedding is not None and not torch.equal(output, embedding):  # as an adapter can train it
        config = replace(config, tie_word_embeddings=False)
    if config.tie_word_embeddings:
        state.pop(LOGITS, None)
    elif output is not None:  # one that an adapter has saved has no bias, because that of tied embeddings has none
        state.setdefault(LOGITS_BIAS, output.new_zeros(output.shape[:1]))
    _check_state(source, dict(model_tensors(config)), state)
    definition = read_definition(source / TOKENIZER_FILE)
    tokenizer = plain_tokenizer(definition, str(source / TOKENIZER_FILE))
    if not 0 <= config.vocab_size - tokenizer.vocab_size < PADDED:
        sizes = f"a tokenizer of {tokenizer.vocab_size:,} tokens and a model of {config.vocab_size:,}"
        raise LineartimeError(f"{source} holds {sizes}: save it again after resize_token_embeddings(len(tokenizer)).")
    config = replace(config, vocab_size=tokenizer.vocab_size)
    if config.task != "mlm":
        _check_end(source, tokenizer.end_of_document, definition)
    model = build_model(config).float()  # whatever PyTorch's default dtype is
    state |= {name: state[name][: config.vocab_size] for name in (LOGITS, LOGITS_BIAS, EMBEDDING) if name in state}
    model.load_state_dict(state)
    return model, tokenizer


def _weight_files(folder: Path) -> list[Path]:
    """The weight files in a folder; raises LineartimeError if the index names none, or files elsewhere."""
    if not (folder / INDEX).exists():
        return [folder / WEIGHTS]
    listed = read_plain(folder / INDEX).get("weight_map")
    names = sorted({str(name) for name in listed.values()}) if isinstance(listed, dict) else []
    if not names or not all(re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise DamagedFileError(folder / INDEX, f"it names {shown(names)}, but must name weight files in its folder")
    return [folder / name for name in names]


def _check_state(source: Path, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise LineartimeError unless the tensors have the names, shapes and kinds that the model wants."""
    problem = next((f"lacks {name}" for name in wanted if name not in state), None)
    for name, tensor in state.items() if problem is None else ():
        if name not in wanted:
            problem = f"holds {name}, which a language model does not have"
        elif tensor.shape != wanted[name].shape:
            shape = list(wanted[name].shape)
            problem = f"holds {name} of shape {list(tensor.shape)}, but its {CONFIG} specifies {shape}"
        elif wanted[name].is_floating_point() and not tensor.is_floating_point():
            raise LineartimeError(f"{source} holds {name} as {tensor.dtype}, but weights must be floats: save it unquantised.")
    if problem is not None:
        raise LineartimeError(f"{source} {problem}: it holds another model than its {CONFIG} describes.")


def _check_end(source: Path, end: int, definition: str) -> None:
    """Raise LineartimeError if texts of the model end with another token than documents in lineartime."""
    known: Any = tokenizers.Tokenizer.from_str(definition)
    generation, tokenizer = "generation_config.json", "tokenizer_config.json"  # `generate` of transformers obeys the first
    for name, key in ((CONFIG, "eos_token_id"), (generation, "eos_token_id"), (tokenizer, "eos_token")):
        file = source / name
        given = read_plain(file).get(key) if file.is_file() else None
        found = known.token_to_id(given) if isinstance(given, str) else given
        if given is not None and found not in (end, [end]):
            own = f"lineartime ends documents of this tokenizer with token {end}, {known.id_to_token(end)!r}"
            raise LineartimeError(f"{file} ends texts with {key} {shown(given)}, but {own}: tune it with that end, or set it.")
