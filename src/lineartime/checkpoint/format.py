"""The format of one checkpoint: its files, their version and their checksums."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineartime.errors import LineartimeError, reporting
from lineartime.files import TOKENIZER_FILE, sha256, synchronise, write_atomically, write_synchronised

if TYPE_CHECKING:  # what a run holds is listed without PyTorch
    from torch import Tensor

    from lineartime.data import Tokenizer
    from lineartime.models.config import ModelConfig
    from lineartime.models.heads import CausalLM, MaskedLM

FORMAT = 1
"""The version of the format, which every JSON file of a checkpoint states. Files without it have version 0."""
OPTIMIZER_FOLDER = "optimizer"
_MODEL, _WEIGHTS, _TRAINING, _MANIFEST = "model.json", "model.safetensors", "training.json", "manifest.json"
_VALIDATION = "validation.json"
_MODEL_FILES = (_WEIGHTS, _MODEL, TOKENIZER_FILE)

# Since version 1, mixers have the names of their systems: hyphens for underscores, and these.
_RENAMED_MIXERS = {
    "attention-relu2": "mhsa-relu2",
    "attention-gated": "mhsa-gated",
    "performer-matmul": "performer",
    "mixed-chunk-heads": "mc-tfm",
}
_NEW_OPTIONS = {"performer-matmul": {"causal_sums": "matmul"}}

_TRAINING_DEFAULTS: dict[str, Any] = {"skipped": 0, "validation_loss": None}
"""The values of fields that training.json may lack. A new field of `TrainingState` gets its value for older files here."""


@dataclass(frozen=True)
class TrainingState:
    """What resuming a run needs besides tensors.

    Attributes:
        step: steps taken.
        skipped: steps that changed nothing, because a gradient was not finite.
        validation_loss: in nats per token, at this step; None if it was not measured before the checkpoint was written.
        text: an identity of the text, which tells whether it has changed.
        data: the position in the text, from the loaders of all processes.
        config: the run's options, as a dictionary.
    """

    step: int
    skipped: int
    validation_loss: float | None
    text: str
    data: dict[str, Any]
    config: dict[str, Any]


class DamagedCheckpointError(LineartimeError):
    """A file of a checkpoint is missing, or is not what was written: `what` says so without advice on what to do."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}.")
        self.what = what


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / f"step-{step:08d}"


def list_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    run = Path(run)
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=checkpoint_step)


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is itself a checkpoint, perhaps a damaged one."""
    return any(Path(path, name).is_file() for name in (_WEIGHTS, _MODEL))


def hidden(checkpoint: Path) -> Path:
    """The name of a checkpoint while it is being written or deleted."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint in a run's folder, as its name tells."""
    return int(checkpoint.name.removeprefix("step-"))


def read_model(checkpoint: Path) -> "CausalLM | MaskedLM":
    """Build the model of a checkpoint with its weights, on the CPU; LineartimeError as for `load`.

    A model that was passed on, without the files that only training needs, may also come without its checksums.
    """
    from lineartime.data import read_tokenizer
    from lineartime.models.heads import build_model

    if (checkpoint / _MANIFEST).exists() or has_training_state(checkpoint):
        verify(checkpoint, _MODEL_FILES)
    try:
        model = build_model(read_model_config(checkpoint))
    except ValueError as error:
        raise _unknown_model(checkpoint, error) from None
    try:
        model.load_state_dict(_read_tensors(checkpoint / _WEIGHTS))
    except RuntimeError as error:
        raise _damaged(checkpoint, str(error).splitlines()[0]) from None
    tokens = read_tokenizer(checkpoint).vocab_size
    if tokens != model.config.vocab_size:
        raise _damaged(checkpoint, f"its tokenizer has {tokens:,} tokens and its model {model.config.vocab_size:,}")
    return model


def read_model_config(checkpoint: Path) -> "ModelConfig":
    """The description of a checkpoint's model; LineartimeError if it cannot be read."""
    from lineartime.models.config import ModelConfig

    version, description = _read_json(checkpoint / _MODEL)
    try:
        return ModelConfig.from_dict(upgraded_model(description) if version == 0 else description)
    except ValueError as error:
        raise _unknown_model(checkpoint, error) from None


def _unknown_model(checkpoint: Path, error: ValueError) -> LineartimeError:
    return LineartimeError(f"{checkpoint / _MODEL} describes no model that this version of lineartime can build: {error}")


def upgraded_model(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description of a model in version 0 of the format, as version 1 writes it."""
    mixer = description.get("mixer")
    if not isinstance(mixer, Mapping):
        return dict(description)
    kind = str(mixer.get("kind")).replace("_", "-")
    return {**description, "mixer": {**mixer, "kind": _RENAMED_MIXERS.get(kind, kind), **_NEW_OPTIONS.get(kind, {})}}


def read_training_state(checkpoint: Path) -> TrainingState:
    """What resuming needs besides tensors, missing fields with their defaults; LineartimeError if it cannot be read."""
    file = checkpoint / _TRAINING
    _, values = _read_json(file)
    values = {**_TRAINING_DEFAULTS, **values}
    fields = [field.name for field in dataclasses.fields(TrainingState)]
    problems = [f"has the unknown field {name!r}" for name in values if name not in fields]
    problems += [f"lacks the field {name!r}" for name in fields if name not in values]
    if problems:
        raise LineartimeError(
            f"{file} {problems[0]}: it was written by another version of lineartime; use that version, or train again."
        )
    return TrainingState(**values)


def has_training_state(checkpoint: Path) -> bool:
    """Whether a checkpoint tells more than its model: it does not if the model alone was passed on."""
    return (checkpoint / _TRAINING).exists()


def read_validation_loss(checkpoint: Path) -> float | None:
    """The validation loss of a checkpoint in nats per token, None if it was not measured; LineartimeError if damaged."""
    if (checkpoint / _VALIDATION).exists():
        return _added_validation_loss(checkpoint)
    return read_training_state(checkpoint).validation_loss if has_training_state(checkpoint) else None


def _added_validation_loss(checkpoint: Path) -> float:
    _, added = _read_json(checkpoint / _VALIDATION)
    loss = added.get("validation_loss")
    if not isinstance(loss, float):
        raise _damaged(checkpoint, f"{_VALIDATION} holds no loss")
    return loss


def add_validation_loss(checkpoint: Path, loss: float) -> None:
    """Add the validation loss to a checkpoint that was written before it was measured; LineartimeError if that fails.

    It gets a file of its own, so that a process killed meanwhile leaves the checkpoint as it was.
    """
    with reporting("write", checkpoint / _VALIDATION):
        write_atomically(checkpoint / _VALIDATION, _json({"validation_loss": loss}))


def verify(checkpoint: Path, names: Iterable[str] | None = None) -> None:
    """Raise DamagedCheckpointError unless these files, or all, are exactly as they were written."""
    if not (checkpoint / _MANIFEST).is_file():
        raise _damaged(checkpoint, f"{_MANIFEST} is missing")
    _, manifest = _read_json(checkpoint / _MANIFEST)
    for name in {*_MODEL_FILES, _TRAINING, *manifest} if names is None else names:
        file = checkpoint / name
        if not file.is_file():
            raise _damaged(checkpoint, f"{name} is missing")
        with reporting("read", file):
            found = sha256(file)
        if found != manifest.get(name):
            raise _damaged(checkpoint, f"{name} is not what was written")
    if names is None and (checkpoint / _VALIDATION).exists():  # added later, so that the manifest does not know it
        _added_validation_loss(checkpoint)


def _read_json(file: Path) -> tuple[int, dict[str, Any]]:
    """The version and the content of a JSON file; LineartimeError for a version that only a later lineartime reads."""
    try:
        with reporting("read", file):
            data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise _damaged(file.parent, f"{file.name} is not JSON") from None
    if not isinstance(data, dict):
        raise _damaged(file.parent, f"{file.name} is not a JSON object")
    version = data.pop("format", 0)
    if not isinstance(version, int):
        raise _damaged(file.parent, f"the format of {file.name} is {version!r}, which is no version")
    if version > FORMAT:
        raise LineartimeError(
            f"{file} has format {version}, but this version of lineartime reads formats up to {FORMAT}: upgrade lineartime."
        )
    return version, data


def _read_tensors(file: Path) -> "dict[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _damaged(file.parent, f"{file.name}: {error}") from None


def _damaged(checkpoint: Path, reason: str) -> DamagedCheckpointError:
    siblings = list_checkpoints(checkpoint.parent)
    others = [other.name for other in siblings if other != checkpoint] if checkpoint in siblings else []
    advice = f"use {others[-1]}" if others else "restore it from a copy, or train again"
    return DamagedCheckpointError(f"The checkpoint {checkpoint} is damaged ({reason})", advice)


def write_files(
    checkpoint: Path,
    weights: "Mapping[str, Tensor]",
    config: "ModelConfig",
    tokenizer: "Tokenizer",
    state: TrainingState | None = None,
) -> None:
    """Add everything but the optimiser's moments to the folder of a checkpoint, and wait until all of it is on the disk.

    Without a state, that is the model alone.

    Raises:
        OSError, SafetensorError: if that fails.
    """
    from safetensors.torch import save_file

    save_file({name: weight.contiguous() for name, weight in weights.items()}, checkpoint / _WEIGHTS)
    synchronise(checkpoint / _WEIGHTS)
    _write_json(checkpoint / _MODEL, config.to_dict())
    write_synchronised(checkpoint / TOKENIZER_FILE, tokenizer.to_json())
    if state is not None:
        _write_json(checkpoint / _TRAINING, vars(state))
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    _write_json(checkpoint / _MANIFEST, {file.relative_to(checkpoint).as_posix(): sha256(file) for file in files})
    for folder in (checkpoint / OPTIMIZER_FOLDER, checkpoint):
        if folder.is_dir():
            synchronise(folder)


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    write_synchronised(file, _json(data))


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, indent=2) + "\n"
