"""Checkpoints: directories of safetensors and JSON that are complete from the moment they can be seen.

A run's folder holds directories step-00000100, .... Each is written under another name and renamed when all its bytes are
on disk, so that being killed at any moment leaves only whole checkpoints. Which is the last and which the best is not
stored, but read off the directories.

    model.safetensors  model.json  tokenizer.json       all that `load`, `eval` and `generate` need
    optimizer/*.safetensors  training.json              all that `train --resume` needs besides
    manifest.json                                       the SHA-256 of each of these files, which all readers check
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineartime.data.tokenizers import TOKENIZER_FILE, load_tokenizer
from lineartime.errors import LineartimeError, cannot
from lineartime.files import sha256, synchronise, write_synchronised
from lineartime.models.config import ModelConfig
from lineartime.models.heads import CausalLM, MaskedLM, build_model

MANIFEST = "manifest.json"
OPTIMIZER_FOLDER = "optimizer"
_MODEL_FILES = ("model.safetensors", "model.json", TOKENIZER_FILE)


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to go on as if it had never stopped, besides tensors.

    Attributes:
        step: steps taken.
        skipped: how many of them changed nothing, because a gradient was not finite.
        validation_loss: in nats per token, at this step; None if it was not measured.
        text: what tells whether the text it learns from is still the same.
        data: where the data stand, as the loaders of all processes say.
        config: the run's options, as a dictionary.
    """

    step: int
    skipped: int
    validation_loss: float | None
    text: str
    data: dict[str, Any]
    config: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON."""
        return dataclasses.asdict(self)


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return run / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def last_checkpoint(run: Path) -> Path:
    """The latest checkpoint in a run's folder; LineartimeError if there is none."""
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        what = "has no checkpoint" if run.is_dir() else "does not exist" if not run.exists() else "is no folder"
        raise LineartimeError(f"{run} {what}: give the folder of a run, or of one of its checkpoints.")
    return checkpoints[-1]


def best_checkpoint(run: Path) -> Path:
    """The checkpoint with the lowest validation loss in a run's folder, or the last; LineartimeError if there is none."""
    last = last_checkpoint(run)
    losses = {checkpoint: read_training_state(checkpoint).validation_loss for checkpoint in reversed(list_checkpoints(run))}
    measured = {checkpoint: loss for checkpoint, loss in losses.items() if loss is not None}
    return min(measured, key=lambda checkpoint: measured[checkpoint]) if measured else last


def is_checkpoint(path: Path) -> bool:
    """Whether a directory is itself a checkpoint, perhaps a damaged one."""
    return any((path / name).is_file() for name in ("model.safetensors", "model.json"))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint directory `path`, or the best one of the run's folder `path`; LineartimeError if there is none."""
    return path if is_checkpoint(path) else best_checkpoint(path)


def load(path: str | Path, device: str | torch.device = "cpu") -> CausalLM | MaskedLM:
    """The model in a checkpoint directory, or the best one of a run's folder, ready for use (in evaluation mode).

    Raises:
        LineartimeError: if there is no checkpoint, or it is damaged.
    """
    checkpoint = find_checkpoint(Path(path))
    verify(checkpoint, _MODEL_FILES)
    try:
        model = build_model(ModelConfig.from_dict(_read_json(checkpoint / "model.json")))
        model.load_state_dict(_read_tensors(checkpoint / "model.safetensors"))
    except (ValueError, RuntimeError) as error:
        raise _damaged(checkpoint, str(error).splitlines()[0]) from None
    tokens = load_tokenizer(checkpoint).vocab_size
    if tokens != model.config.vocab_size:
        raise _damaged(checkpoint, f"its tokenizer has {tokens:,} tokens and its model {model.config.vocab_size:,}")
    return model.to(device).eval()


def read_training_state(checkpoint: Path) -> TrainingState:
    """What a run needs to go on, besides tensors; LineartimeError if it cannot be read."""
    facts = _read_json(checkpoint / "training.json")
    fields = {field.name for field in dataclasses.fields(TrainingState)}
    if facts.keys() != fields:
        raise LineartimeError(
            f"The checkpoint {checkpoint} was written by another version of lineartime, which this one cannot go on from: use "
            "that version, or train again."
        )
    return TrainingState(**facts)


def last_whole_checkpoint(run: Path) -> tuple[Path, dict[Path, str]]:
    """The latest checkpoint that is as it was written, and what is wrong with those after it; LineartimeError if none is."""
    wrong: dict[Path, str] = {}
    checkpoints = list_checkpoints(run) or [last_checkpoint(run)]
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint)
        except DamagedCheckpointError as error:
            if checkpoint == checkpoints[0] and wrong:
                raise LineartimeError(
                    f"All checkpoints in {run} are damaged: restore one of them from a copy, or train again."
                ) from None
            if checkpoint == checkpoints[0]:
                raise
            wrong[checkpoint] = str(error).split(": ", 1)[0]
        else:
            break
    return checkpoint, wrong


def set_aside(checkpoint: Path) -> None:
    """Give a damaged checkpoint a name under which nobody takes it for a whole one."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
    except OSError as error:
        raise cannot("rename", checkpoint, error) from None


def prune(run: Path) -> None:
    """Delete all checkpoints but the best, the last, and the one before, in case the last is damaged one day.

    What cannot be read, or deleted, is left alone.
    """
    try:
        keep = {best_checkpoint(run), *list_checkpoints(run)[-2:]}
        for checkpoint in list_checkpoints(run):
            if checkpoint not in keep:
                checkpoint.rename(hidden(checkpoint))  # so that being killed while deleting leaves nothing half visible
                shutil.rmtree(hidden(checkpoint), ignore_errors=True)
    except (LineartimeError, OSError):
        return


def remove_partial(run: Path) -> None:
    """Delete what a killed process left half written or half deleted."""
    for partial in run.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def hidden(checkpoint: Path) -> Path:
    """Where a checkpoint stands before it is whole, and while it is deleted."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def digests(checkpoint: Path) -> dict[str, str]:
    """The SHA-256 of every file in a checkpoint, by its path in there."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.name != MANIFEST)
    return {file.relative_to(checkpoint).as_posix(): sha256(file) for file in files}


def verify(checkpoint: Path, names: Iterable[str] | None = None) -> None:
    """Raise LineartimeError unless these files, or all, are there, byte for byte as they were written."""
    if not (checkpoint / MANIFEST).is_file():
        raise _damaged(checkpoint, f"{MANIFEST} is missing")
    manifest = _read_json(checkpoint / MANIFEST)
    for name in {*_MODEL_FILES, "training.json", *manifest} if names is None else names:
        file = checkpoint / name
        if not file.is_file():
            raise _damaged(checkpoint, f"{name} is missing")
        try:
            found = sha256(file)
        except OSError as error:
            raise cannot("read", file, error) from None
        if found != manifest.get(name):
            raise _damaged(checkpoint, f"{name} is not what was written")


class DamagedCheckpointError(LineartimeError):
    """A file of a checkpoint is not what was written."""


def _damaged(checkpoint: Path, reason: str) -> DamagedCheckpointError:
    siblings = list_checkpoints(checkpoint.parent)
    others = [other.name for other in siblings if other != checkpoint] if checkpoint in siblings else []
    advice = f"use {others[-1]}" if others else "restore it from a copy, or train again"
    return DamagedCheckpointError(f"The checkpoint {checkpoint} is damaged ({reason}): {advice}.")


def write_json(file: Path, data: dict[str, Any]) -> None:
    """Write plain data to the disk itself; OSError if that fails."""
    write_synchronised(file, json.dumps(data, indent=2) + "\n")


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to the disk itself, as safetensors; OSError if that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from None
    synchronise(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot("read", file, error) from None
    except ValueError:
        raise _damaged(file.parent, f"{file.name} is not JSON") from None
    if not isinstance(data, dict):
        raise _damaged(file.parent, f"{file.name} is not a JSON object")
    return data


def _read_tensors(file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _damaged(file.parent, f"{file.name}: {error}") from None
