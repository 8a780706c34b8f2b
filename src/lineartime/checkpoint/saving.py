"""Saving a model that no training run saves: one that was changed, or trained by a loop of your own."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.checkpoint.format import write_files
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.files import new_folder

if TYPE_CHECKING:  # what a run holds is listed without PyTorch
    from lineartime.data import Tokenizer
    from lineartime.models.heads import LanguageModel


def save(model: "LanguageModel", tokenizer: "Tokenizer", folder: str | Path) -> Path:
    """Save a model with its tokenizer into a new folder, which `load`, `evaluate` and all commands read.

    The folder is written under another name and renamed when all of it is on the disk.

    Args:
        model: the model, on any device.
        tokenizer: the one that made its token ids.
        folder: where to save it; a folder that holds something is not replaced.

    Returns:
        The folder.

    Raises:
        ArgumentError: for something else than a model, a tokenizer that does not fit it, or a folder that cannot be taken.
        LineartimeError: if it cannot be written.
    """
    from safetensors import SafetensorError

    from lineartime.data.tokenizers import check_vocabulary
    from lineartime.models.heads import LanguageModel, check_model

    model = check_model(model, LanguageModel, "be saved", computes=False)
    check_vocabulary(tokenizer, model.config.vocab_size)
    folder = Path(folder)
    if re.fullmatch(r"step-\d{8,}", folder.name):
        raise ArgumentError("folder", f"is {folder}, the name of a checkpoint in a run: choose another name.")
    with new_folder("folder", folder) as partial:
        try:
            weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
            write_files(partial, weights, model.config, tokenizer)
        except SafetensorError as error:
            raise LineartimeError(f"Cannot write {folder}: {error}.") from None
    return folder
