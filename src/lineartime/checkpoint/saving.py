"""Save a model outside of a training run: one that was modified, or trained in your own loop."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.checkpoint.format import CHECKPOINT, write_files
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.files import new_folder

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    from lineartime.data import Tokenizer
    from lineartime.models.heads import LanguageModel


def save(model: "LanguageModel", tokenizer: "Tokenizer", folder: str | Path) -> Path:
    """Save a model with its tokenizer into a new folder, which `load`, `evaluate` and all commands can read.

    The folder is written under a temporary name and renamed when all of it is on the disk.

    Args:
        model: the model, on any device.
        tokenizer: the tokenizer with which the model was trained.
        folder: where to save it; a folder that is not empty is not replaced.

    Returns:
        The folder.

    Raises:
        ArgumentError: for anything but a model, weights that are not finite, a tokenizer that does not fit, or a folder that
            cannot be used.
        LineartimeError: if it cannot be written.
    """
    from safetensors import SafetensorError

    from lineartime.data.tokenizers import check_vocabulary
    from lineartime.models.heads import LanguageModel, check_model

    model = check_model(model, LanguageModel, "be saved", computes=False)
    check_vocabulary(tokenizer, model.config.vocab_size)
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ArgumentError("model", f"has numbers in {name} that are not finite, so it could not be loaded again.")
    folder = Path(folder)
    if re.fullmatch(CHECKPOINT, folder.name):
        raise ArgumentError("folder", f"is {folder}, the name of a checkpoint in a run: choose another name.")
    with new_folder("folder", folder) as partial:
        try:
            weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
            write_files(partial, weights, model.config, tokenizer)
        except SafetensorError as error:
            raise LineartimeError(f"Cannot write {folder}: {error}.") from None
    return folder
