"""Saving a model that no training run saves: one that was changed, or trained by a loop of your own."""

import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from lineartime.checkpoint.format import write_files
from lineartime.errors import ArgumentError, LineartimeError, reporting
from lineartime.files import synchronise

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
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ArgumentError("folder", f"is {folder}, which exists already: delete it, or choose another folder.")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    with reporting("write", folder):
        try:
            partial.mkdir(parents=True)
            weights = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
            write_files(partial, weights, model.config, tokenizer)
            partial.rename(folder)
            synchronise(folder.parent)
        except SafetensorError as error:
            raise LineartimeError(f"Cannot write {folder}: {error}.") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder
