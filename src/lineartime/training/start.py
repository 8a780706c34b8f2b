"""What a new run starts with: whether the weights fit the model that it is asked to train, and notes for its user."""

from pathlib import Path
from typing import Any

import torch

from lineartime import checkpoint as checkpoints
from lineartime.choices import Precision
from lineartime.data import Tokenizer, fingerprint, read_tokenizer, ready_tokenizer, size_to_train
from lineartime.data.train_tokenizer import names_folder
from lineartime.errors import Argument, ArgumentError, LineartimeError, spell
from lineartime.layers.contract import NO_FUTURE, BrokenPromiseError, check_mixer
from lineartime.machine import faster_precision
from lineartime.models.backbone import Block
from lineartime.models.config import ModelConfig
from lineartime.models.memory import model_tensors
from lineartime.models.presets import nearest_preset, resolve, values_of
from lineartime.training.config import TrainConfig
from lineartime.training.overrides import errors_in_override


def check_start(config: TrainConfig, start: Path) -> None:
    """Compare the model that the options describe with that of a checkpoint, whose weights it is to take.

    Raises:
        ArgumentError: naming the option with which the weights do not fit.
    """
    theirs = checkpoints.read_model_config(start)
    size, nearest = _vocab_size(config.tokenizer), nearest_preset(theirs)
    if size != theirs.vocab_size:
        raise _unfit("tokenizer", f"is {config.tokenizer}, which has {size:,} tokens", f"has {theirs.vocab_size:,}")
    ours = config.model_config(size)
    with errors_in_override():
        fits = _shapes(ours) == _shapes(theirs)
    # A preset of another size is a mistake, although the overrides that are taken from the other run make it fit.
    named, found = (resolve(name, config.task) for name in (config.preset, nearest))
    if (named.d_model, named.n_blocks) != (found.d_model, found.n_blocks) or (not fits and config.preset != nearest):
        raise _unfit("preset", f"is {config.preset}", f"is {nearest}")
    if fits:
        return
    given, there = values_of(ours), values_of(theirs)
    for name in (item.partition("=")[0] for item in config.override):
        if name in given and given[name] != there.get(name) and _changes_shapes(theirs, name, given[name]):
            raise _unfit("override", f"sets {name} to {given[name]}", f"has {there.get(name)}")
    raise _unfit("task", f"is {config.task}", f"has other weights, for {theirs.task}")


def check_tokenizer(config: TrainConfig, tokenizer: Tokenizer, start: Path) -> None:
    """Raise ArgumentError unless the tokenizer is the one whose tokens the model of a checkpoint knows."""
    if fingerprint(tokenizer) != fingerprint(read_tokenizer(start)):
        raise _unfit("tokenizer", f"is {config.tokenizer or 'bytes'}", "has learnt the tokens of another one")


def start_notes(config: TrainConfig, tokenizer: Tokenizer, model: ModelConfig) -> list[str]:
    """Sentences about what the user of a new run might not expect, for instance a tokenizer that is smaller than its name says.

    Raises:
        BrokenPromiseError: for a mixer of the user's own that reads later tokens: its losses would mean nothing.
    """
    notes = _check_own_mixer(model)
    wanted = None if config.tokenizer is None else size_to_train(config.tokenizer)
    if wanted is not None and tokenizer.vocab_size < wanted:
        smaller = f"The tokenizer has {tokenizer.vocab_size:,} tokens instead of {wanted:,}"
        notes.append(f"{smaller}, because the text is too short for more.")
    if config.init_from is not None and checkpoints.has_training_state(config.init_from):
        before = checkpoints.read_training_state(config.init_from).config.get("context_length")
        if before is not None and before != config.context_length:
            now = f"{spell(Argument('context_length'))} is {config.context_length:,}"
            notes.append(f"The weights were trained on {before:,} tokens at a time; now, {now}.")
    return notes


def precision_notes(precision: Precision, before: Precision | None, device: torch.device) -> list[str]:
    """A sentence about the precision of a run, if it may surprise; `before` is that of the run that is resumed."""
    faster, reason = faster_precision(device)
    if before not in (None, "auto", precision):
        return [f"Computing in {precision}, and no longer in {before}."]
    if precision != faster and (precision == "bf16" or before is not None):
        return [f"Computing in {precision}; {faster} would be faster here, because {reason}."]
    return []


def _check_own_mixer(model: ModelConfig) -> list[str]:
    """Check a mixer that is not of the library. A broken promise that does not concern training is a note."""
    if model.mixer.layer.__module__.partition(".")[0] == "lineartime":
        return []
    with torch.random.fork_rng(devices=[]):
        mixer = Block(model).mixer
    try:
        check_mixer(mixer)
    except LineartimeError as error:
        if isinstance(error, BrokenPromiseError) and error.promise == NO_FUTURE:
            raise
        return [str(error)]
    return []


def _unfit(option: str, given: str, there: str) -> ArgumentError:
    return ArgumentError(option, f"{given}, but the model of ", Argument("init_from"), f" {there}: leave it out.")


def _vocab_size(choice: str | None) -> int:
    """The number of tokens of a tokenizer; of one that is still to be trained, the number in its name."""
    if choice is not None and names_folder(choice):
        return checkpoints.load_tokenizer(choice).vocab_size
    size = None if choice is None else size_to_train(choice)
    return ready_tokenizer(choice).vocab_size if size is None else size


def _shapes(config: ModelConfig) -> Any:
    """What two models have in common if, and only if, the weights of one fit the other."""
    size = model_tensors(config)
    return size.n_blocks, *({name: tensor.shape for name, tensor in part.items()} for part in (size.block, size.rest))


def _changes_shapes(config: ModelConfig, name: str, value: object) -> bool:
    try:
        return bool(_shapes(config.override(**{name: value})) != _shapes(config))
    except ValueError:  # only with another field
        return True
