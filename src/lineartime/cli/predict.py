"""`lineartime predict`: answer questions or label texts with a fine-tuned model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lineartime import choices
from lineartime.cli.options import Device
from lineartime.errors import require_packages
from lineartime.screen import Progress


@dataclass(frozen=True)
class PredictOptions:
    """The options of `lineartime predict`."""

    run: Path
    """Folder that `lineartime finetune` wrote."""
    file: Path
    """JSON lines or CSV with question and context, or the layout of SQuAD or TriviaQA; or texts as in training."""
    out: Path
    """New file of JSON lines with id, and answer or label; one in .json gets answers by id, for official scripts."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on after the lines that a stopped command has written."""
    batch_size: int = 16
    """Windows that are read at once; answers do not depend on it."""
    device: Device = "auto"
    precision: choices.Precision = "auto"
    """Precision of matrix products: fp32 or bf16; auto takes the faster one."""


def run(options: PredictOptions) -> None:
    """Answer or label the inputs, and print how many there were."""
    require_packages("datasets", "transformers", "scipy", "sklearn", extra="finetune", purpose="Predicting")
    from lineartime.finetuning.predict import predict

    given = {name: getattr(options, name) for name in ("resume", "batch_size", "device", "precision")}
    with Progress(f"reading {options.file}"):
        count = predict(options.run, options.file, options.out, **given)
    print(f"{options.out}: {count:,} predictions")
