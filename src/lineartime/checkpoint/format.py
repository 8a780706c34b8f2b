"""The format of one checkpoint: its files, their version and their checksums."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from lineartime.checkpoint.contents import Manifest, TrainingState, ValidationLoss
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import (
    CHECKPOINT,
    TOKENIZER_FILE,
    is_folder,
    is_there,
    sha256,
    synchronise,
    write_atomically,
    write_synchronised,
)
from lineartime.json_files import DamagedFileError, decoded, read_plain

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    from torch import Tensor

    from lineartime.data import Tokenizer
    from lineartime.models.config import ModelConfig
    from lineartime.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
    from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM

FORMAT = 1
"""The version of the format, which every JSON file of a checkpoint states. Files without a version have version 0."""
OPTIMIZER_FOLDER = "optimizer"
_MODEL, WEIGHTS, _TRAINING, _MANIFEST = "model.json", "model.safetensors", "training.json", "manifest.json"
_VALIDATION = "validation.json"
Content = TypeVar("Content")
_MODEL_FILES = (WEIGHTS, _MODEL, TOKENIZER_FILE)

# Since version 1, mixers are named after their systems: hyphens replace underscores, and these names changed.
_RENAMED_MIXERS = {
    "attention-relu2": "mhsa-relu2",
    "attention-gated": "mhsa-gated",
    "performer-matmul": "performer",
    "mixed-chunk-heads": "mc-tfm",
}
_NEW_OPTIONS = {"performer-matmul": {"causal_sums": "matmul"}}


class DamagedCheckpointError(LineartimeError):
    """A file of a checkpoint is missing or differs from what was written. `what` is the message without advice."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}: {advice}.")
        self.args = (what, advice)  # used to copy the error to another process
        self.what = what


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / f"step-{step:08d}"


def list_checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first."""
    run = Path(run)
    if not is_folder(run):
        return []
    with reporting_file_errors("read", run):
        found = [path for path in run.iterdir() if re.fullmatch(CHECKPOINT, path.name) and is_folder(path)]
    return sorted(found, key=checkpoint_step)


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is itself a checkpoint, perhaps a damaged one."""
    return any(is_there(Path(path, name)) for name in (WEIGHTS, _MODEL))


def partial_path(checkpoint: Path) -> Path:
    """The name of a checkpoint while it is being written or deleted."""
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint in a run's folder, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_model(checkpoint: Path) -> "tuple[CausalLM | MaskedLM, Tokenizer]":
    """As `read_any_model`, but for a language model: raises LineartimeError for an encoder-decoder."""
    read_model_config(checkpoint)
    model, tokenizer = read_any_model(checkpoint)
    return cast("CausalLM | MaskedLM", model), tokenizer


def read_any_model(checkpoint: Path) -> "tuple[CausalLM | MaskedLM | EncoderDecoder, Tokenizer]":
    """Build the model of a checkpoint with its weights, on the CPU, and its tokenizer. Raises as `load` does."""
    from lineartime.checkpoint.weights import UnfitWeightsError, check_weights, load_weights
    from lineartime.data import read_tokenizer
    from lineartime.models.encoder_decoder import build_described
    from lineartime.models.memory import check_memory

    verify_model(checkpoint)
    config = _read_config(checkpoint)
    try:
        check_weights(checkpoint / WEIGHTS, config)
        try:
            check_memory(config)
        except ArgumentError as error:
            raise LineartimeError(f"{checkpoint} holds a model that is too large for this machine: {error}") from None
        model = build_described(config).float()  # whatever PyTorch's default dtype is
        load_weights(checkpoint / WEIGHTS, model)
    except UnfitWeightsError as error:
        raise damaged(checkpoint, str(error)) from None
    except ValueError as error:
        raise _unknown_model(checkpoint, error) from None
    tokenizer = read_tokenizer(checkpoint)
    if tokenizer.vocab_size != model.config.vocab_size:
        sizes = f"its tokenizer has {tokenizer.vocab_size:,} tokens and its model {model.config.vocab_size:,}"
        raise damaged(checkpoint, sizes)
    return model, tokenizer


def load_into(model: "LanguageModel", checkpoint: Path) -> None:
    """Copy the weights of a checkpoint into a model. Raises DamagedCheckpointError if they are damaged, or do not fit."""
    from lineartime.checkpoint.weights import UnfitWeightsError, load_weights

    try:
        check_fit(checkpoint, model.config)
        load_weights(checkpoint / WEIGHTS, model)
    except UnfitWeightsError as error:
        raise damaged(checkpoint, str(error)) from None


def check_fit(checkpoint: Path, config: "ModelConfig") -> None:
    """Raise UnfitWeightsError unless the weights of a checkpoint fit a model, and DamagedCheckpointError if it is damaged."""
    from lineartime.checkpoint.weights import check_weights

    verify_model(checkpoint)
    check_weights(checkpoint / WEIGHTS, config)


def verify_model(checkpoint: Path) -> None:
    """Raise DamagedCheckpointError unless the files of the model match their checksums, which a shared model may lack."""
    if not (checkpoint / WEIGHTS).is_file():
        raise damaged(checkpoint, f"{WEIGHTS} is missing")
    if (checkpoint / _MANIFEST).exists() or has_training_state(checkpoint):
        verify(checkpoint, _MODEL_FILES)


def read_model_config(checkpoint: Path) -> "ModelConfig":
    """Read the config of a checkpoint's language model. Raises LineartimeError if it cannot be read, or is of another kind."""
    from lineartime.models.config import ModelConfig

    config = _read_config(checkpoint)
    if not isinstance(config, ModelConfig):
        raise LineartimeError(f"{checkpoint} holds an encoder-decoder, which `predict()` uses: give one with a language model.")
    return config


def _read_config(checkpoint: Path) -> "ModelConfig | EncoderDecoderConfig":
    from lineartime.models.config import ModelConfig
    from lineartime.models.encoder_decoder import EncoderDecoderConfig

    version, description = _read(checkpoint / _MODEL)
    try:
        if "n_decoder_blocks" in description:
            return EncoderDecoderConfig.from_dict(description)
        return ModelConfig.from_dict(upgraded_model(description) if version == 0 else description)
    except ValueError as error:
        raise _unknown_model(checkpoint, error) from None


def _unknown_model(checkpoint: Path, error: ValueError) -> LineartimeError:
    return LineartimeError(f"{checkpoint / _MODEL} describes no model that this version of lineartime can build: {error}")


def upgraded_model(description: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the config of a model from version 0 of the format to version 1."""
    mixer = description.get("mixer")
    if not isinstance(mixer, Mapping):
        return dict(description)
    kind = str(mixer.get("kind")).replace("_", "-")
    return {**description, "mixer": {**mixer, "kind": _RENAMED_MIXERS.get(kind, kind), **_NEW_OPTIONS.get(kind, {})}}


def read_training_state(checkpoint: Path) -> TrainingState:
    """Read what resuming needs besides tensors; missing fields take defaults. Raises LineartimeError if unreadable."""
    file = checkpoint / _TRAINING
    _, values = _read(file)
    try:
        state = decoded(TrainingState, values)
        if re.fullmatch(CHECKPOINT, checkpoint.name) and state.step != checkpoint_step(checkpoint):
            raise ValueError(f"step is {state.step}, but must be that of the folder")
    except ValueError as error:
        advice = "use the version of lineartime that wrote it, restore it from a copy, or train again"
        raise LineartimeError(f"{file} cannot be read ({error}): {advice}.") from None
    return state


def has_training_state(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the state of training; it does not if only the model was shared."""
    return (checkpoint / _TRAINING).exists()


def read_validation_loss(checkpoint: Path) -> float | None:
    """The validation loss of a checkpoint in nats per token; None if not measured. Raises LineartimeError if damaged."""
    if (checkpoint / _VALIDATION).exists():
        return _read_as(ValidationLoss, checkpoint / _VALIDATION).validation_loss
    return read_training_state(checkpoint).validation_loss if has_training_state(checkpoint) else None


def add_validation_loss(checkpoint: Path, loss: float) -> None:
    """Add the validation loss to a checkpoint that was written before it was measured. Raises LineartimeError on failure.

    The loss gets its own file, so that a process killed meanwhile leaves the checkpoint as it was.
    """
    with reporting_file_errors("write", checkpoint / _VALIDATION):
        write_atomically(checkpoint / _VALIDATION, _json({"validation_loss": loss}))


def verify(checkpoint: Path, names: Iterable[str] | None = None) -> None:
    """Raise DamagedCheckpointError unless the given files, or by default all files, match their checksums."""
    if not (checkpoint / _MANIFEST).is_file():
        raise damaged(checkpoint, f"{_MANIFEST} is missing")
    manifest = _read_as(Manifest, checkpoint / _MANIFEST)
    for name in {*_MODEL_FILES, _TRAINING, *manifest} if names is None else names:
        file = checkpoint / name
        if not file.is_file():
            raise damaged(checkpoint, f"{name} is missing")
        with reporting_file_errors("read", file):
            found = sha256(file)
        if found != manifest.get(name):
            raise damaged(checkpoint, f"{name} is not what was written")
    if names is None and (checkpoint / _VALIDATION).exists():  # added later, so it is not in the manifest
        _read_as(ValidationLoss, checkpoint / _VALIDATION)


def _read_as(content: type[Content], file: Path) -> Content:
    """Read a JSON file as a dataclass or a dictionary."""
    _, values = _read(file)
    try:
        return decoded(content, values)
    except ValueError as error:
        raise damaged(file.parent, f"{file.name}: {error}") from None


def _read(file: Path) -> tuple[int, dict[str, Any]]:
    """The version and content of a JSON file. Raises LineartimeError for a version that only a later lineartime reads."""
    try:
        data = read_plain(file)
        version = data.pop("format", 0)
        if type(version) is not int or version < 0:
            raise DamagedFileError(file, f"format is {shown(version)}, but must be an integer, at least 0")
    except DamagedFileError as error:
        raise damaged(file.parent, f"{file.name}: {error.what}") from None
    if version > FORMAT:
        raise LineartimeError(
            f"{file} has format {version}, but this version of lineartime reads formats up to {FORMAT}: upgrade lineartime."
        )
    return version, data


def damaged(checkpoint: Path, reason: str) -> DamagedCheckpointError:
    """The error for a checkpoint that cannot be used. It names another one to use instead, if there is one."""
    siblings = list_checkpoints(checkpoint.parent)
    others = [other.name for other in siblings if other != checkpoint] if checkpoint in siblings else []
    advice = f"use {others[-1]}" if others else "restore it from a copy, or train again"
    return DamagedCheckpointError(f"The checkpoint {checkpoint} is damaged ({reason})", advice)


def write_files(
    checkpoint: Path,
    weights: "Mapping[str, Tensor]",
    config: "ModelConfig | EncoderDecoderConfig",
    tokenizer: "Tokenizer",
    state: TrainingState | None = None,
) -> None:
    """Add everything but the optimiser's moments to the folder of a checkpoint, and wait until all of it is on the disk.

    Without `state`, only the model and its tokenizer are written. Raises OSError or SafetensorError if writing fails.
    """
    from safetensors.torch import save_file

    save_file({name: weight.contiguous() for name, weight in weights.items()}, checkpoint / WEIGHTS)
    synchronise(checkpoint / WEIGHTS)
    write_synchronised(checkpoint / _MODEL, _json(config.to_dict()))
    shutil.copymode(checkpoint / _MODEL, checkpoint / WEIGHTS)  # safetensors lets only their owner read them
    write_synchronised(checkpoint / TOKENIZER_FILE, tokenizer.to_json())
    if state is not None:
        write_synchronised(checkpoint / _TRAINING, _json(state.to_dict()))
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    checksums = {file.relative_to(checkpoint).as_posix(): sha256(file) for file in files}
    write_synchronised(checkpoint / _MANIFEST, _json(checksums))
    for folder in (checkpoint / OPTIMIZER_FOLDER, checkpoint):
        if folder.is_dir():
            synchronise(folder)


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, indent=2) + "\n"
