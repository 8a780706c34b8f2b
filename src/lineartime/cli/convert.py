"""`lineartime convert`: a model for transformers, and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lineartime.checkpoint import Which


@dataclass(frozen=True)
class Options:
    """Convert a trained model into a folder for the transformers library, or such a folder back into one of lineartime."""

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="SOURCE")]]
    """Folder of a run, of a checkpoint, or of a model that transformers saved."""
    destination: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="DESTINATION")]]
    """Folder to write."""
    checkpoint: Which | None = None
    """Checkpoint of the run: best, last, or the step of one; the default is the best, by validation loss."""


def run(options: Options) -> None:
    """Convert the model, and say how to load it."""
    from lineartime.hf.convert import convert
    from lineartime.hf.folder import CONFIG

    folder = convert(options.source, options.destination, checkpoint=options.checkpoint)
    if (folder / CONFIG).exists():
        print(f"{folder}: a model of transformers, which its Auto classes load after `import lineartime.hf`")
    else:
        print(f"{folder}: a model of lineartime, which `lineartime generate {folder}` and the other commands read")
