"""Checkpoints: what a trained model is saved as, and how it is loaded.

A run's folder contains checkpoints step-00000100, .... Each is written under a hidden name and renamed when all its bytes are
on the disk, so that a process killed at any moment leaves only complete checkpoints. Which one is the last and which the best
is not stored anywhere, but read from the folder.

    model.safetensors  model.json  tokenizer.json       what `load` needs
    optimizer/*.safetensors  training.json              what resuming the run needs, too
    manifest.json                                       the SHA-256 of each of these files, which every reader checks
"""

from pathlib import Path

import torch

from lineartime.checkpoint.folder import (
    best_checkpoint,
    find_checkpoint,
    last_checkpoint,
    last_whole_checkpoint,
    prune,
    remove_partial,
    set_aside,
)
from lineartime.checkpoint.format import (
    TrainingState,
    checkpoint_path,
    is_checkpoint,
    list_checkpoints,
    read_model,
    read_training_state,
    verify,
)
from lineartime.models.heads import CausalLM, MaskedLM

__all__ = [
    "TrainingState",
    "best_checkpoint",
    "checkpoint_path",
    "find_checkpoint",
    "is_checkpoint",
    "last_checkpoint",
    "last_whole_checkpoint",
    "list_checkpoints",
    "load",
    "prune",
    "read_training_state",
    "remove_partial",
    "set_aside",
    "verify",
]


def load(path: str | Path, device: str | torch.device = "cpu") -> CausalLM | MaskedLM:
    """Load the model of a checkpoint, or of the best checkpoint in a run's folder, in evaluation mode.

    Raises:
        LineartimeError: if there is no checkpoint, or it is damaged, or this version of lineartime cannot read it.
    """
    return read_model(find_checkpoint(Path(path))).to(device).eval()
