"""The folder of a fine-tuning: what it was begun with, and what was found. It is read without PyTorch."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lineartime.checkpoint import find_checkpoint
from lineartime.checkpoint.format import WEIGHTS
from lineartime.errors import ArgumentError, reporting_file_errors, require_packages
from lineartime.fields import shown
from lineartime.files import is_folder, is_there, read_file, sha256, write_file
from lineartime.finetuning.config import FinetuneConfig
from lineartime.runs.record import LOCK_FILE

MODEL, PREDICTIONS, RESULT = "model", "predictions.json", "finetune.json"
BEGUN = "inputs.json"
"""The file that says of predictions what they are made from, in the folder `begun_folder`, until all are made."""
_SAME_RESULT = ("resume", "out", "device", "advanced")
"""Options that do not decide the result, and the place of more options."""


@dataclass(frozen=True)
class Trial:
    """The best evaluation of one peak learning rate."""

    metrics: dict[str, float]  # on what is validated with; none if training diverged
    epoch: float  # when they were measured, or training diverged
    losses: tuple[float, ...]  # the mean training loss since the evaluation before, for each evaluation
    learning_rate: float  # the peak

    def score(self, metric: str) -> float:
        """A metric by which trials are compared: those that diverged come last."""
        return self.metrics.get(metric, -math.inf)


@dataclass(frozen=True)
class FinetuneResult:
    """What fine-tuning found."""

    config: dict[str, Any]
    trials: tuple[Trial, ...]  # the learning rates that are done
    best: int | None  # the place of the best trial; None until all are done
    max_answer_tokens: int | None  # the longest answer to a question that is given; None for another task
    inputs: dict[str, str] = field(default_factory=dict)  # digests of the data and the model; none in the first fine-tunings

    def best_trial(self) -> Trial:
        """The best of the trials, of a fine-tuning that is done."""
        assert self.best is not None
        return self.trials[self.best]

    def write(self, folder: Path) -> None:
        """Write finetune.json."""
        write_file(folder / RESULT, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def check_finetuning(config: FinetuneConfig) -> None:
    """Raise LineartimeError for a missing package, or paths with which fine-tuning cannot begin. Nothing slow is imported."""
    require_packages(
        "datasets", "transformers", "accelerate", "peft", "scipy", "sklearn", extra="finetune", purpose="Fine-tuning"
    )
    out = config.out
    with reporting_file_errors("read", out):
        if config.resume and not (out / RESULT).is_file():
            raise ArgumentError("resume", f"is True, but {out} holds no training that has begun: leave it out.")
        if is_there(out) and not (is_folder(out) and (config.resume or {each.name for each in out.iterdir()} <= {LOCK_FILE})):
            what = f"is {out}, which is not empty: give `resume=True` to go on there, or choose another folder."
            raise ArgumentError("out", what)
    if not is_there(config.data):
        raise ArgumentError("data", f"is {config.data}, which does not exist: give a file, or a folder of two.")
    find_checkpoint(config.run)


def begun(config: FinetuneConfig) -> FinetuneResult:
    """What a fine-tuning that is resumed has found, or one without trials.

    Raises ArgumentError if what is resumed was begun with other options, other data, or another model.
    """
    options = dataclasses.asdict(config)
    options |= options["advanced"]
    plain = json.loads(json.dumps({name: value for name, value in options.items() if name not in _SAME_RESULT}, default=str))
    inputs = {"data": digest(config.data), "run": digest(find_checkpoint(config.run) / WEIGHTS)}
    if not config.resume:
        return FinetuneResult(plain, (), None, None, inputs)
    found = read_file(config.out / RESULT, FinetuneResult)
    for option, value in plain.items():
        before = found.config.get(option)
        if value != before:
            was = f"{config.out} was begun with {shown(before)}"
            raise ArgumentError(option, f"is {shown(value)}, but {was}: resume with the same options.")
    check_same(inputs, found.inputs, {name: getattr(config, name) for name in inputs}, config.out)
    return found


def check_same(inputs: dict[str, str], before: dict[str, Any], paths: dict[str, Any], out: Path) -> None:
    """Raise ArgumentError for an input that is another one, by its digest, than that with which `out` was begun."""
    for name, value in inputs.items():
        if before.get(name, value) != value:
            what = f"is {paths[name]}, but {out} was begun with another one or another content"
            raise ArgumentError(name, f"{what}: resume with that, or choose another place.")


def digest(path: Path) -> str:
    """A fingerprint of a file, or of a folder of data, in which texts beside records, as of TriviaQA, count by their sizes.

    Raises LineartimeError if a file cannot be read.
    """
    with reporting_file_errors("read", path):
        if not path.is_dir():
            return sha256(path)
        files = sorted(file for places in ("*", "qa/*", "evidence/*/*") for file in path.glob(places) if file.is_file())
        found = [(str(each), each.stat().st_size if each.suffix == ".txt" else sha256(each)) for each in files]
        return hashlib.sha256(json.dumps([(name[len(str(path)) :], of) for name, of in found]).encode()).hexdigest()


def check_prediction(model: Path, inputs: Path, out: Path, resume: bool) -> FinetuneResult:
    """What the fine-tuning found whose model is to predict.

    Raises LineartimeError for a missing package, or for paths with which predicting cannot begin. Nothing slow is imported.
    """
    require_packages("datasets", "transformers", extra="finetune", purpose="Predicting")
    if is_there(out) and not (resume and out.suffix != ".json" and (begun_folder(out) / BEGUN).is_file()):
        raise ArgumentError("out", f"is {out}, which exists already: delete it, or choose another file.")
    if not is_there(inputs):
        raise ArgumentError("file", f"is {inputs}, which does not exist: give a file of questions or texts.")
    result = read_file(model / RESULT, FinetuneResult) if (model / RESULT).is_file() else None
    if result is None or result.best is None:
        what = f"is {model}, which holds no fine-tuned model: give the folder that `finetune()` wrote to its end."
        raise ArgumentError("run", what)
    return result


def begun_folder(out: Path) -> Path:
    """The folder beside a file of predictions that exists until all are made."""
    return out.with_name(f"{out.name}.partial")
