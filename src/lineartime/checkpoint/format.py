"""The files of one checkpoint: what they hold, how they are written, and how they are checked when they are read.

The contents of JSON files are frozen dataclasses with types and ranges. The weights are compared with the model's config before
memory is allocated.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from lineartime.choices import Task
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import Between, Count, decode, shown
from lineartime.files import (
    CHECKPOINT,
    TOKENIZER_FILE,
    DamagedFileError,
    decoded,
    is_folder,
    is_there,
    read_plain,
    write_atomically,
)

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    from torch import Tensor

    from lineartime.data import Tokenizer
    from lineartime.models.config import ModelConfig
    from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM
    from lineartime.seq2seq import EncoderDecoder, EncoderDecoderConfig

FORMAT = 1
"""The version of the format, which every JSON file of a checkpoint states."""
OPTIMIZER_FOLDER = "optimizer"
WEIGHTS = "model.safetensors"
_MODEL, _TRAINING, _VALIDATION = "model.json", "training.json", "validation.json"

Step = Annotated[int, Between(0, 10**9)]

_GONE = ("like", "lanes", "max_expansion", "shuffle_documents")
"""Options that the first runs recorded, and that training no longer has."""
# The options of a run that are read without the training package, which knows and checks all options.
_OPTIONS: dict[str, Any] = {
    "preset": str,
    "task": Task,
    "data": str | tuple[str, ...] | None,
    "text_column": str,
    "include": tuple[str, ...],
    "exclude": tuple[str, ...],
    "tokenizer": str | None,
    "context_length": Annotated[int, Between(1, 10**9)],
    "tokens_per_batch": Annotated[int, Between(1, 10**12)] | None,
    "steps": Annotated[int, Between(1, 10**9)],
}


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run, without those that are gone. Raises ArgumentError for a wrong type or range of those known here."""
    for option, value in options.items():
        decode(_OPTIONS.get(option, Any), value, f"{name}.{option}")
    kept = {option: value for option, value in options.items() if option not in _GONE}
    if isinstance(kept.get("track"), (list, tuple)):  # of which one is gone
        kept["track"] = [name for name in kept["track"] if name != "trackio"]
    return kept


@dataclass(frozen=True)
class StreamPosition:
    """The position in the share that a process has of a streamed text."""

    epoch: Step  # how often the share has ended
    source: dict[str, Any] | None  # the state of its source, as the datasets library describes it; None at the beginning
    used: Count  # the number of tokens to skip from there


@dataclass(frozen=True)
class TextPosition:
    """The position in the text, from the loaders of all processes."""

    rows: Count  # the number of sequences that were read
    of: Annotated[int, Between(1, 10**6)] | None = None  # the number of processes that read a streamed text
    processes: dict[str, StreamPosition] | None = None  # the position of each process

    def to_dict(self) -> dict[str, Any]:
        """Return the position as loaders describe it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


HELD_OUT = ", held out "
"""What stands before the digest of the held-out text in the identity of a text."""


@dataclass(frozen=True)
class TrainingState:
    """What resuming a run needs besides tensors: training.json."""

    step: Step  # steps taken
    text: str  # the identity of the text, which shows whether it has changed
    data: TextPosition
    config: dict[str, Any]  # the run's options
    skipped: Step = 0  # steps that were skipped because the loss or the gradient was not finite
    validation_loss: float | None = None  # in nats per token, at this step; None if it was not measured by then

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", checked_options("config", self.config))

    @property
    def held_out(self) -> str:
        """The digest of the held-out text."""
        return self.text.partition(HELD_OUT)[2]

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON."""
        return {**vars(self), "data": self.data.to_dict()}


@dataclass(frozen=True)
class ValidationLoss:
    """A loss that was measured after its checkpoint was written: validation.json."""

    validation_loss: float


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
    from lineartime.data import read_tokenizer
    from lineartime.models.cost import check_memory

    config = _read_config(checkpoint)
    try:
        check_weights(checkpoint / WEIGHTS, config)
        try:
            check_memory(config)
        except ArgumentError as error:
            raise LineartimeError(f"{checkpoint} holds a model that is too large for this machine: {error}") from None
        model = config.build().float()  # whatever PyTorch's default dtype is
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
    """Copy the weights of a checkpoint into a model. Raises LineartimeError if they are damaged, or do not fit."""
    try:
        check_weights(checkpoint / WEIGHTS, model.config)
    except UnfitWeightsError as error:
        raise damaged(checkpoint, str(error)) from None
    load_weights(checkpoint / WEIGHTS, model)


def read_model_config(checkpoint: Path) -> "ModelConfig":
    """Read the config of a checkpoint's language model. Raises LineartimeError if it cannot be read, or is of another kind."""
    from lineartime.models.config import ModelConfig

    config = _read_config(checkpoint)
    if not isinstance(config, ModelConfig):
        raise LineartimeError(f"{checkpoint} holds an encoder-decoder, no language model: read it with `lineartime.load`.")
    return config


def _read_config(checkpoint: Path) -> "ModelConfig | EncoderDecoderConfig":
    from lineartime.models.config import ModelConfig
    from lineartime.seq2seq import EncoderDecoderConfig

    description = _read(checkpoint / _MODEL)
    try:
        if "n_decoder_blocks" in description:
            return EncoderDecoderConfig.from_dict(description)
        return ModelConfig.from_dict(description)
    except ValueError as error:
        raise _unknown_model(checkpoint, error) from None


def _unknown_model(checkpoint: Path, error: ValueError) -> LineartimeError:
    return LineartimeError(f"{checkpoint / _MODEL} describes no model that this version of lineartime can build: {error}")


def read_training_state(checkpoint: Path) -> TrainingState:
    """Read what resuming needs besides tensors; missing fields take defaults. Raises LineartimeError if unreadable."""
    values = _read(checkpoint / _TRAINING)
    values.pop("automatic", None)  # which the first runs recorded, and nothing needs
    try:
        state = decoded(TrainingState, values)
        if re.fullmatch(CHECKPOINT, checkpoint.name) and state.step != checkpoint_step(checkpoint):
            raise ValueError(f"step is {state.step}, but must be that of the folder")
    except ValueError as error:
        raise damaged(checkpoint, f"{_TRAINING}: {error}") from None
    return state


def has_training_state(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the state of training; it does not if only the model was shared."""
    return (checkpoint / _TRAINING).exists()


def read_validation_loss(checkpoint: Path) -> float | None:
    """The validation loss of a checkpoint in nats per token; None if not measured. Raises LineartimeError if damaged."""
    if (checkpoint / _VALIDATION).exists():
        try:
            return decoded(ValidationLoss, _read(checkpoint / _VALIDATION)).validation_loss
        except ValueError as error:
            raise damaged(checkpoint, f"{_VALIDATION}: {error}") from None
    return read_training_state(checkpoint).validation_loss if has_training_state(checkpoint) else None


def add_validation_loss(checkpoint: Path, loss: float) -> None:
    """Add the validation loss to a checkpoint that was written before it was measured. Raises LineartimeError on failure.

    The loss gets its own file, so that a process killed meanwhile leaves the checkpoint as it was.
    """
    with reporting_file_errors("write", checkpoint / _VALIDATION):
        write_atomically(checkpoint / _VALIDATION, _json({"validation_loss": loss}))


def _read(file: Path) -> dict[str, Any]:
    """The content of a JSON file. Raises LineartimeError for a version that only a later lineartime reads."""
    try:
        data = read_plain(file)
        version = data.pop("format", FORMAT)
        if type(version) is not int or version < 1:
            raise DamagedFileError(file, f"format is {shown(version)}, but must be an integer, at least 1")
    except DamagedFileError as error:
        raise damaged(file.parent, f"{file.name}: {error.what}") from None
    if version > FORMAT:
        raise LineartimeError(
            f"{file} has format {version}, but this version of lineartime reads formats up to {FORMAT}: upgrade lineartime."
        )
    return data


def damaged(checkpoint: Path, reason: str) -> LineartimeError:
    """The error for a checkpoint that cannot be used. It names another one to use instead, if there is one."""
    siblings = list_checkpoints(checkpoint.parent)
    others = [other.name for other in siblings if other != checkpoint] if checkpoint in siblings else []
    advice = f"use {others[-1]}, or delete the damaged one" if others else "restore it from a copy, or train again"
    return LineartimeError(f"The checkpoint {checkpoint} is damaged ({reason}): {advice}.")


def write_files(
    checkpoint: Path,
    weights: "Mapping[str, Tensor]",
    config: "ModelConfig | EncoderDecoderConfig",
    tokenizer: "Tokenizer",
    state: TrainingState | None = None,
) -> None:
    """Add everything but the optimiser's moments to the folder of a checkpoint.

    Without `state`, only the model and its tokenizer are written. Raises OSError or SafetensorError if writing fails.
    """
    from safetensors.torch import save_file

    save_file({name: weight.contiguous() for name, weight in weights.items()}, checkpoint / WEIGHTS)
    (checkpoint / _MODEL).write_text(_json(config.to_dict()), encoding="utf-8")
    shutil.copymode(checkpoint / _MODEL, checkpoint / WEIGHTS)  # safetensors lets only their owner read them
    (checkpoint / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    if state is not None:
        (checkpoint / _TRAINING).write_text(_json(state.to_dict()), encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, indent=2) + "\n"


FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of floating-point weights, as the header of a file names them."""


def all_finite(tensor: "Tensor") -> bool:
    """Whether all numbers are finite in float32, in which models are loaded."""
    return bool(tensor.float().isfinite().all())


class UnfitWeightsError(ValueError):
    """Weights that do not fit the model. The message is a clause."""


def check_weights(file: Path, config: "ModelConfig | EncoderDecoderConfig") -> None:
    """Compare the names, shapes and types in the header of a file with what a model needs; nothing else is read.

    Raises UnfitWeightsError, naming the tensor that differs, ArgumentError for a model that is too large for PyTorch, and
    LineartimeError for a file that is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    from lineartime.models.cost import model_tensors

    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is not a dict
            header = {name: (list(found.get_shape()), found.get_dtype()) for name, found in slices.items()}
    except (SafetensorError, OSError) as error:
        raise damaged(file.parent, f"{file.name}: {error}") from None
    for name, wanted in model_tensors(config):  # which may be many more, in a damaged description
        if name not in header:
            raise UnfitWeightsError(f"{file.name} lacks {name}")
        shape, dtype = header.pop(name)
        if shape != list(wanted.shape):
            raise UnfitWeightsError(f"{name} has the shape {shape}, but the model needs {list(wanted.shape)}")
        if wanted.is_floating_point() and dtype not in FLOATS:
            raise UnfitWeightsError(f"{name} is of type {dtype}, but must be one of {', '.join(FLOATS)}")
        if not wanted.is_floating_point() and not dtype.startswith(("I", "U")):
            raise UnfitWeightsError(f"{name} is of type {dtype}, but must be integers")
    if header:
        raise UnfitWeightsError(f"{file.name} has the tensor {shown(min(header))}, which the model does not have")


def load_weights(file: Path, model: "LanguageModel | EncoderDecoder") -> None:
    """Copy the weights of a file, which `check_weights` has compared, into a model, one tensor at a time.

    Raises LineartimeError for a damaged file, or if a number is not finite.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with torch.no_grad(), safe_open(file, framework="pt") as opened:
            for name, own in model.state_dict().items():
                own.copy_(opened.get_tensor(name))
                if not torch.isfinite(own).all():  # float64 may hold numbers that are infinite in the dtype of the model
                    raise damaged(file.parent, f"{name} holds numbers that are not finite")
    except (SafetensorError, OSError) as error:
        raise damaged(file.parent, f"{file.name}: {error}") from None
