"""Checkpoints: how a trained model is saved and loaded.

A run's folder contains checkpoints named step-00000100, ... Each is written under a hidden name and renamed when all its bytes
are on the disk, so that a process killed at any moment leaves only complete checkpoints. The last and the best checkpoint are
not stored anywhere, but determined from the folder.

    model.safetensors  model.json  tokenizer.json       what `load` needs
    optimizer/*.safetensors  training.json              what resuming the run also needs
    validation.json                                     the validation loss, if it was measured after the rest was written
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from lineartime.checkpoint.format import (
    TextPosition,
    TrainingState,
    UnfitWeightsError,
    add_validation_loss,
    checkpoint_path,
    checkpoint_step,
    has_training_state,
    is_checkpoint,
    list_checkpoints,
    load_into,
    partial_path,
    read_any_model,
    read_model,
    read_model_config,
    read_training_state,
    read_validation_loss,
)
from lineartime.checkpoint.saving import save
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import check_type, shown
from lineartime.files import TOKENIZER_FILE, is_folder, is_there, remove, remove_abandoned

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    import torch

    from lineartime.data import Tokenizer
    from lineartime.models.language_model import CausalLM, MaskedLM
    from lineartime.seq2seq import EncoderDecoder

__all__ = [
    "CheckpointChoice",
    "Loaded",
    "NoCheckpointError",
    "TextPosition",
    "TrainingState",
    "UnfitWeightsError",
    "add_validation_loss",
    "best_checkpoint",
    "checkpoint_path",
    "find_checkpoint",
    "has_training_state",
    "is_checkpoint",
    "last_checkpoint",
    "list_checkpoints",
    "load",
    "load_into",
    "load_tokenizer",
    "load_with_tokenizer",
    "prune",
    "read_from",
    "read_model_config",
    "read_training_state",
    "read_validation_loss",
    "remove_partial",
    "save",
]


CheckpointChoice = Literal["best", "last"] | int
"""A checkpoint of a run: the best one, the last one, or that of a step."""
Content = TypeVar("Content")


class NoCheckpointError(LineartimeError):
    """There is no checkpoint at a path. `problem` says why, without the path and without advice."""

    advice = "give the folder of a run, or of one of its checkpoints"

    def __init__(self, path: Path) -> None:
        self.problem = "has no checkpoint" if is_folder(path) else "is no folder" if is_there(path) else "does not exist"
        super().__init__(f"{path} {self.problem}: {self.advice}.")
        self.args = (path,)  # used to copy the error to another process


def load(
    path: str | Path, device: "str | torch.device" = "cpu", *, checkpoint: CheckpointChoice | None = None
) -> "CausalLM | MaskedLM | EncoderDecoder":
    """Load a model in evaluation mode, from the folder of a run or of one checkpoint.

    Args:
        path: the folder.
        device: the device to load the model to: "auto" for the best one here, or a name or a device of PyTorch.
        checkpoint: which checkpoint of a run: "best" (the default), with the lowest validation loss; "last"; or a step.

    Raises:
        LineartimeError: if there is no such checkpoint, or it is damaged, or this version of lineartime cannot read it; or if
            PyTorch has no such device here.
    """
    from lineartime.machine import choose_device

    place = choose_device(device)
    return read_from(path, read_any_model, checkpoint)[0].to(place).eval()


class Loaded(NamedTuple):
    """A language model in evaluation mode and its tokenizer, both from the same checkpoint."""

    checkpoint: Path
    model: "CausalLM | MaskedLM"
    tokenizer: "Tokenizer"


def load_with_tokenizer(
    path: str | Path, device: "str | torch.device" = "cpu", *, checkpoint: CheckpointChoice | None = None
) -> Loaded:
    """Load a language model with its tokenizer; arguments and errors as for `load`, and an error for an encoder-decoder."""
    from lineartime.machine import choose_device

    place = choose_device(device)
    loaded = read_from(path, lambda found: Loaded(found, *read_model(found)), checkpoint)
    loaded.model.to(place).eval()
    return loaded


def read_from(path: str | Path, read: Callable[[Path], Content], which: CheckpointChoice | None = None) -> Content:
    """Read from the checkpoint that `find_checkpoint` finds. Raises LineartimeError as `find_checkpoint` and `read`."""
    check_type("path", path, str | Path)
    return read(find_checkpoint(path, which))


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load the tokenizer of a run or of a checkpoint, from a tokenizer.json, or by its name: "bytes", or "hub:gpt2".

    Raises LineartimeError if there is none, or it cannot be read.
    """
    from lineartime.data.tokenizers import is_ready_name, named_tokenizer, read_tokenizer

    check_type("path", path, str | Path)
    if not is_ready_name(str(path)) and is_folder(path) and not is_there(Path(path, TOKENIZER_FILE)):
        return read_from(path, read_tokenizer)
    return named_tokenizer(str(path))


def last_checkpoint(run: str | Path) -> Path:
    """The latest checkpoint in a run's folder. Raises LineartimeError if there is none."""
    run = Path(run)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise NoCheckpointError(run)
    return checkpoints[-1]


def best_checkpoint(run: str | Path) -> Path:
    """The checkpoint with the lowest validation loss, or the last if no loss was measured.

    The untrained model of step 0 is the best only if it is the only one. Raises LineartimeError if there is no checkpoint.
    """
    last = last_checkpoint(run)
    losses: dict[Path, float] = {}
    for checkpoint in reversed(list_checkpoints(run)):
        try:
            loss = read_validation_loss(checkpoint) if checkpoint_step(checkpoint) > 0 else None
        except LineartimeError:
            if checkpoint.exists():  # otherwise the run has just removed it
                raise
            continue
        if loss is not None:
            losses[checkpoint] = loss
    return min(losses, key=losses.__getitem__, default=last)


def find_checkpoint(path: str | Path, which: CheckpointChoice | None = None) -> Path:
    """Return the path itself if it is a checkpoint, otherwise a checkpoint of the run at the path: by default, the best one.

    Raises LineartimeError if there is none, and ArgumentError for an invalid `which`, or if the path is a checkpoint itself.
    """
    path = Path(path)
    if is_there(path / "config.json") and not is_there(path / "model.json") and not list_checkpoints(path):
        raise LineartimeError(f"{path} holds a transformers model: convert it to lineartime with `lineartime.hf.convert()`.")
    if is_checkpoint(path):
        if which is not None:
            raise ArgumentError(
                "checkpoint", f"is {which}, but {path} is a checkpoint itself: leave it out, or give the folder of the run."
            )
        return path
    if which is None or which == "best":
        return best_checkpoint(path)
    last = last_checkpoint(path)
    if which == "last":
        return last
    found = {checkpoint_step(checkpoint): checkpoint for checkpoint in list_checkpoints(path)}
    if not isinstance(which, int) or isinstance(which, bool) or which not in found:
        needed = f"must be best, last, or the step of a checkpoint in {path}, which has {', '.join(map(str, found))}"
        raise ArgumentError("checkpoint", f"is {shown(which)}, but {needed}.")
    return found[which]


def prune(run: Path, keep_every: int | None = None) -> None:
    """Delete all checkpoints except the best, the last, and the one before it, in case the last is damaged later.

    Checkpoints whose step is a multiple of `keep_every` are kept, except that of step 0. If one cannot be read or deleted, the
    rest are kept too.
    """
    try:
        keep = {best_checkpoint(run), *list_checkpoints(run)[-2:]}
        for checkpoint in list_checkpoints(run):
            step = checkpoint_step(checkpoint)
            wanted = keep_every is not None and step > 0 and step % keep_every == 0
            if checkpoint not in keep and not wanted:
                aside = partial_path(checkpoint)
                checkpoint.rename(aside)  # so that a kill during the deletion leaves no incomplete checkpoint
                shutil.rmtree(aside, ignore_errors=True)
    except (LineartimeError, OSError):
        return


def remove_partial(run: Path) -> None:
    """Delete what a killed process of the run left half written or half deleted; the caller holds the run's lock.

    Commands that write a folder or a file of their own into the run's folder do not hold it, so that theirs are left to age.
    """
    for partial in run.glob("*.partial"):
        if re.fullmatch(r"\.step-.*|[^.].*\.[0-9a-f]{32}\.partial", partial.name):  # of checkpoints, and `write_atomically`
            remove(partial)
    remove_abandoned(run, r"\..+\.[0-9a-f]{32}\.partial(\..+)?")
