"""Checkpoints: what a trained model is saved as, and how it is loaded.

A run's folder contains checkpoints step-00000100, .... Each is written under a hidden name and renamed when all its bytes are
on the disk, so that a process killed at any moment leaves only complete checkpoints. Which one is the last and which the best
is not stored anywhere, but read from the folder.

    model.safetensors  model.json  tokenizer.json       what `load` needs
    optimizer/*.safetensors  training.json              what resuming the run needs, too
    manifest.json                                       the SHA-256 of each of these files, which every reader checks
"""

import shutil
from pathlib import Path

import torch

from lineartime.checkpoint.format import (
    DamagedCheckpointError,
    TrainingState,
    checkpoint_path,
    has_training_state,
    hidden,
    is_checkpoint,
    list_checkpoints,
    read_model,
    read_training_state,
    verify,
)
from lineartime.checkpoint.saving import save
from lineartime.errors import LineartimeError, reporting
from lineartime.models.heads import CausalLM, MaskedLM

__all__ = [
    "TrainingState",
    "best_checkpoint",
    "checkpoint_path",
    "find_checkpoint",
    "has_training_state",
    "is_checkpoint",
    "last_checkpoint",
    "last_whole_checkpoint",
    "list_checkpoints",
    "load",
    "prune",
    "read_training_state",
    "remove_partial",
    "save",
    "set_aside",
    "verify",
]


def load(path: str | Path, device: str | torch.device = "cpu") -> CausalLM | MaskedLM:
    """Load the model of a checkpoint, or of the best checkpoint in a run's folder, in evaluation mode.

    Raises:
        LineartimeError: if there is no checkpoint, or it is damaged, or this version of lineartime cannot read it.
    """
    return read_model(find_checkpoint(path)).to(device).eval()


def last_checkpoint(run: str | Path) -> Path:
    """The latest checkpoint in a run's folder; LineartimeError if there is none."""
    run = Path(run)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        problem = "has no checkpoint" if run.is_dir() else "is no folder" if run.exists() else "does not exist"
        raise LineartimeError(f"{run} {problem}: give the folder of a run, or of one of its checkpoints.")
    return checkpoints[-1]


def best_checkpoint(run: str | Path) -> Path:
    """The checkpoint with the lowest validation loss, or the last if no loss was measured; LineartimeError if there is none."""
    last = last_checkpoint(run)
    losses = {checkpoint: read_training_state(checkpoint).validation_loss for checkpoint in reversed(list_checkpoints(run))}
    measured = {checkpoint: loss for checkpoint, loss in losses.items() if loss is not None}
    return min(measured, key=measured.__getitem__, default=last)


def find_checkpoint(path: str | Path) -> Path:
    """The path itself if it is a checkpoint, or the best checkpoint of the run there; LineartimeError if there is none."""
    return Path(path) if is_checkpoint(path) else best_checkpoint(path)


def last_whole_checkpoint(run: Path) -> tuple[Path, dict[Path, str]]:
    """The latest checkpoint that is not damaged, and what is wrong with those after it; LineartimeError if there is none."""
    wrong: dict[Path, str] = {}
    checkpoints = list_checkpoints(run) or [last_checkpoint(run)]
    for checkpoint in reversed(checkpoints):
        try:
            verify(checkpoint)
        except DamagedCheckpointError as error:
            if len(checkpoints) == 1:
                raise
            wrong[checkpoint] = error.what
        else:
            return checkpoint, wrong
    raise LineartimeError(f"All checkpoints in {run} are damaged: restore one of them from a copy, or train again.")


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, so that nothing reads it again."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    with reporting("rename", checkpoint):
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)


def prune(run: Path) -> None:
    """Delete all checkpoints but the best, the last, and the one before it, in case the last is damaged later.

    Checkpoints that cannot be read or deleted stay.
    """
    try:
        keep = {best_checkpoint(run), *list_checkpoints(run)[-2:]}
        for checkpoint in list_checkpoints(run):
            if checkpoint not in keep:
                checkpoint.rename(hidden(checkpoint))  # so that a kill during the deletion leaves no incomplete checkpoint
                shutil.rmtree(hidden(checkpoint), ignore_errors=True)
    except (LineartimeError, OSError):
        return


def remove_partial(run: Path) -> None:
    """Delete checkpoints that a killed process left half written or half deleted."""
    for partial in run.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
