"""Checkpoints: how a trained model is saved and loaded.

A run's folder contains checkpoints named step-00000100, ... Each is written under a hidden name and renamed when all its bytes
are on the disk, so that a process killed at any moment leaves only complete checkpoints. The last and the best checkpoint are
not stored anywhere, but determined from the folder.

    model.safetensors  model.json  tokenizer.json       what `load` needs
    optimizer/*.safetensors  training.json              what resuming the run also needs
    validation.json                                     the validation loss, if it was measured after the rest was written

The weights are compared with the model's config before memory is allocated.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import Between, check_type, decode, shown
from lineartime.files import (
    CHECKPOINT,
    TOKENIZER_FILE,
    DamagedFileError,
    is_folder,
    is_there,
    new_folder,
    os_error_behind,
    read_plain,
    remove,
    remove_abandoned,
    write_atomically,
)

if TYPE_CHECKING:  # the contents of a run can be listed without PyTorch
    import torch
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

CheckpointChoice = Literal["best", "last"] | int
"""A checkpoint of a run: the best one, the last one, or that of a step."""
Step = Annotated[int, Between(0, 10**9)]

HELD_OUT = ", held out "
"""What stands before the digest of the held-out text in the identity of a text."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of floating-point weights, as the header of a file names them."""


class NoCheckpointError(LineartimeError):
    """There is no checkpoint at a path. `problem` says why, without the path and without advice."""

    advice = "give the folder of a run, or of one of its checkpoints"

    def __init__(self, path: Path) -> None:
        self.problem = "has no checkpoint" if is_folder(path) else "is no folder" if is_there(path) else "does not exist"
        super().__init__(f"{path} {self.problem}: {self.advice}.")
        self.args = (path,)  # used to copy the error to another process


class UnfitWeightsError(ValueError):
    """Weights that do not fit the model. The message is a clause."""


class Loaded(NamedTuple):
    """A language model in evaluation mode and its tokenizer, both from the same checkpoint."""

    checkpoint: Path
    model: "CausalLM | MaskedLM"
    tokenizer: "Tokenizer"


@dataclass(frozen=True)
class TrainingState:
    """What resuming a run needs besides tensors: training.json."""

    step: Step  # steps taken
    text: str  # the identity of the text, which shows whether it has changed
    data: dict[str, Any]  # the position in the text, from the loaders of all processes
    config: dict[str, Any]  # the run's options
    skipped: Step = 0  # steps that were skipped because the loss or the gradient was not finite
    validation_loss: float | None = None  # in nats per token, at this step; None if it was not measured by then

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", known_options(self.config))

    @property
    def held_out(self) -> str:
        """The digest of the held-out text."""
        return self.text.partition(HELD_OUT)[2]


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run, without those that the first runs recorded and training no longer has."""
    gone = ("like", "lanes", "max_expansion", "shuffle_documents")
    kept = {option: value for option, value in options.items() if option not in gone}
    if isinstance(kept.get("track"), (list, tuple)):
        kept["track"] = [name for name in kept["track"] if name != "trackio"]
    return kept


# Find a checkpoint ----------------------------------------------------------------------------------------------------


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


def last_checkpoint(run: str | Path) -> Path:
    """The latest checkpoint in a run's folder. Raises LineartimeError if there is none."""
    run = Path(run)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise NoCheckpointError(run)
    return checkpoints[-1]


def best_checkpoint(run: str | Path) -> Path:
    """The checkpoint with the lowest validation loss, or the last if no loss was measured.

    The untrained model of step 0 is the best only if it is the only one. Raises LineartimeError if there is no checkpoint.
    """
    last = last_checkpoint(run)
    losses: dict[Path, float] = {}
    for checkpoint in reversed(list_checkpoints(run)):
        try:
            loss = read_validation_loss(checkpoint) if checkpoint_step(checkpoint) > 0 else None
        except LineartimeError:
            if checkpoint.exists():  # otherwise the run has just removed it
                raise
            continue
        if loss is not None:
            losses[checkpoint] = loss
    return min(losses, key=losses.__getitem__, default=last)


def find_checkpoint(path: str | Path, which: CheckpointChoice | None = None) -> Path:
    """Return the path itself if it is a checkpoint, otherwise a checkpoint of the run at the path: by default, the best one.

    Raises LineartimeError if there is none, and ArgumentError for an invalid `which`, or if the path is a checkpoint itself.
    """
    check_type("path", path, str | Path)
    path = Path(path)
    if is_there(path / "config.json") and not is_there(path / "model.json") and not list_checkpoints(path):
        raise LineartimeError(f"{path} holds a transformers model: convert it by `lineartime convert`.")
    if is_checkpoint(path):
        if which is not None:
            found = f"is {which}, but {path} is a checkpoint itself: leave it out, or give the folder of the run."
            raise ArgumentError("checkpoint", found)
        return path
    if which is None or which == "best":
        return best_checkpoint(path)
    last = last_checkpoint(path)
    if which == "last":
        return last
    steps = {checkpoint_step(checkpoint): checkpoint for checkpoint in list_checkpoints(path)}
    if not isinstance(which, int) or isinstance(which, bool) or which not in steps:
        needed = f"must be best, last, or the step of a checkpoint in {path}, which has {', '.join(map(str, steps))}"
        raise ArgumentError("checkpoint", f"is {shown(which)}, but {needed}.")
    return steps[which]


# Load ---------------------------------------------------------------------------------------------------------------


def load(
    path: str | Path, device: "str | torch.device" = "cpu", *, checkpoint: CheckpointChoice | None = None
) -> "CausalLM | MaskedLM | EncoderDecoder":
    """Load a model in evaluation mode, from the folder of a run or of one checkpoint.

    Args:
        path: the folder.
        device: the device to load the model to: "auto" for the best one here, or a name or a device of PyTorch.
        checkpoint: which checkpoint of a run: "best" (the default), with the lowest validation loss; "last"; or a step.

    Raises:
        LineartimeError: if there is no such checkpoint, or it is damaged, or this version of lineartime cannot read it; or if
            PyTorch has no such device here.
    """
    from lineartime.machine import choose_device

    place = choose_device(device)
    return _read_model(find_checkpoint(path, checkpoint))[0].to(place).eval()


def load_with_tokenizer(
    path: str | Path, device: "str | torch.device" = "cpu", *, checkpoint: CheckpointChoice | None = None
) -> Loaded:
    """Load a language model with its tokenizer; arguments and errors as for `load`, and an error for an encoder-decoder."""
    from lineartime.machine import choose_device

    place, found = choose_device(device), find_checkpoint(path, checkpoint)
    read_model_config(found)
    model, tokenizer = _read_model(found)
    return Loaded(found, cast("CausalLM | MaskedLM", model).to(place).eval(), tokenizer)


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Load the tokenizer of a run or of a checkpoint, from a tokenizer.json, or by its name: "bytes", or "hub:gpt2".

    Raises LineartimeError if there is none, or it cannot be read.
    """
    from lineartime.data.tokenizers import is_ready_name, named_tokenizer, read_tokenizer

    check_type("path", path, str | Path)
    if not is_ready_name(str(path)) and is_folder(path) and not is_there(Path(path, TOKENIZER_FILE)):
        return read_tokenizer(find_checkpoint(path))
    return named_tokenizer(str(path))


def _read_model(checkpoint: Path) -> "tuple[CausalLM | MaskedLM | EncoderDecoder, Tokenizer]":
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

    description = _read_json(checkpoint / _MODEL)
    try:
        return (EncoderDecoderConfig if "n_decoder_blocks" in description else ModelConfig).from_dict(description)
    except ValueError as error:
        found = f"{checkpoint / _MODEL} describes no model that this version of lineartime can build: {error}"
        raise LineartimeError(found) from None


def read_training_state(checkpoint: Path) -> TrainingState:
    """Read what resuming needs besides tensors; missing fields take defaults. Raises LineartimeError if unreadable."""
    values = _read_json(checkpoint / _TRAINING)
    values.pop("automatic", None)  # which the first runs recorded, and nothing needs
    try:
        state: TrainingState = decode(TrainingState, values)
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
            loss: float = decode(float, _read_json(checkpoint / _VALIDATION).get("validation_loss"), "validation_loss")
            return loss
        except ArgumentError as error:
            raise damaged(checkpoint, f"{_VALIDATION}: {error}") from None
    return read_training_state(checkpoint).validation_loss if has_training_state(checkpoint) else None


def add_validation_loss(checkpoint: Path, loss: float) -> None:
    """Add the validation loss to a checkpoint that was written before it was measured. Raises LineartimeError on failure.

    The loss gets its own file, so that a process killed meanwhile leaves the checkpoint as it was.
    """
    with reporting_file_errors("write", checkpoint / _VALIDATION):
        write_atomically(checkpoint / _VALIDATION, _json({"validation_loss": loss}))


def _read_json(file: Path) -> dict[str, Any]:
    """The content of a JSON file. Raises LineartimeError for a version that only a later lineartime reads."""
    try:
        data = read_plain(file)
        version = decode(Annotated[int, Between(1)], data.pop("format", FORMAT), "format")
    except DamagedFileError as error:
        raise damaged(file.parent, f"{file.name}: {error.what}") from None
    except ArgumentError as error:
        raise damaged(file.parent, f"{file.name}: {error}") from None
    if version > FORMAT:
        found = f"{file} has format {version}, but this version of lineartime reads formats up to {FORMAT}"
        raise LineartimeError(f"{found}: upgrade lineartime.")
    return data


def damaged(checkpoint: Path, reason: str) -> LineartimeError:
    """The error for a checkpoint that cannot be used. It names another one to use instead, if there is one."""
    siblings = list_checkpoints(checkpoint.parent)
    others = [other.name for other in siblings if other != checkpoint] if checkpoint in siblings else []
    advice = f"use {others[-1]}, or delete the damaged one" if others else "restore it from a copy, or train again"
    return LineartimeError(f"The checkpoint {checkpoint} is damaged ({reason.rstrip('.')}): {advice}.")


def all_finite(tensor: "Tensor") -> bool:
    """Whether all numbers are finite in float32, in which models are loaded."""
    return bool(tensor.float().isfinite().all())


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


# Write --------------------------------------------------------------------------------------------------------------


def save(model: "LanguageModel | EncoderDecoder", tokenizer: "Tokenizer", folder: str | Path) -> Path:
    """Save a model with its tokenizer into a new folder, which `load`, `evaluate` and all commands can read.

    The folder is written under a temporary name and renamed when all of it is on the disk.

    Args:
        model: the model, on any device.
        tokenizer: the tokenizer with which the model was trained.
        folder: where to save it; a folder that is not empty is not replaced.

    Returns:
        The folder.

    Raises:
        ArgumentError: for anything but a model, layers or weights that are not those of the model's config, weights that are
            not finite, a tokenizer that does not fit, or a folder that cannot be used.
        LineartimeError: if it cannot be written.
    """
    from lineartime.data.tokenizers import check_vocabulary
    from lineartime.models.language_model import LanguageModel, check_model
    from lineartime.seq2seq import EncoderDecoder

    if not isinstance(model, EncoderDecoder):
        model = check_model(model, LanguageModel, "be saved", computes=False)
    check_vocabulary(tokenizer, model.config.vocab_size)
    for name, weight in model.state_dict().items():
        if weight.is_meta:
            raise ArgumentError("model", f"has {name} on the meta device, where it has no values: move it from there first.")
        if not all_finite(weight.detach().cpu()):
            raise ArgumentError("model", f"has numbers in {name} that are not finite, so it could not be loaded again.")
    check_layers(model)
    with new_folder("folder", Path(folder)) as partial:
        write_model(partial, model, tokenizer)
        try:
            check_weights(partial / WEIGHTS, model.config)
        except UnfitWeightsError as error:
            raise ArgumentError("model", f"could not be loaded again: {error}.") from None
    return Path(folder)


def check_layers(model: "LanguageModel | EncoderDecoder") -> None:
    """Raise ArgumentError unless every module has the class and the options with which the config builds it again."""
    from torch import nn

    from lineartime.machine import shapes_only

    with shapes_only():
        built = model.config.build()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, wanted in built.named_modules(remove_duplicate=False):
        found = modules.get(name)
        if found is None or isinstance(found, nn.Dropout):  # missing weights are named later; saved models do not drop
            continue
        if type(found) is not type(wanted):
            kinds = f"has a {type(found).__name__} as {name}, but a {type(wanted).__name__} in its config"
            raise ArgumentError("model", f"{kinds}, so another model would be loaded: save its state_dict() instead.")
        for option, value in vars(wanted).items():
            is_option = isinstance(value, (bool, int, float, str, type(None))) and option[0] != "_" and option != "training"
            if is_option and (own := getattr(found, option)) != value:
                differs = f"has {option} = {own!r} in {name}, but {value!r} in its config, so another model would be loaded"
                raise ArgumentError("model", f"{differs}: build it with {option}={own!r}, and copy its weights.")


def write_model(folder: Path, model: "LanguageModel | EncoderDecoder", tokenizer: "Tokenizer") -> None:
    """Write a model and its tokenizer into a folder. Raises OSError on failure."""
    # Copies, because safetensors refuses weights that share memory.
    weights = {name: weight.detach().to("cpu", copy=True) for name, weight in model.state_dict().items()}
    write_files(folder, weights, model.config, tokenizer)


def write_files(
    checkpoint: Path,
    weights: "Mapping[str, Tensor]",
    config: "ModelConfig | EncoderDecoderConfig",
    tokenizer: "Tokenizer",
    state: TrainingState | None = None,
    moments: "Mapping[str, Tensor] | None" = None,
) -> None:
    """Fill the folder of a checkpoint. Without `state`, only the model and its tokenizer are written. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    (checkpoint / _MODEL).write_text(_json(config.to_dict()), encoding="utf-8")
    (checkpoint / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    if state is not None:
        (checkpoint / _TRAINING).write_text(_json(vars(state)), encoding="utf-8")
    for tensors, file in ((weights, checkpoint / WEIGHTS), (moments, checkpoint / OPTIMIZER_FOLDER / "moments.safetensors")):
        if tensors:
            file.parent.mkdir(exist_ok=True)
            try:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            except SafetensorError as error:
                raise os_error_behind(error) from None
            shutil.copymode(checkpoint / _MODEL, file)  # safetensors lets only their owner read them


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, **data}, indent=2) + "\n"


def prune(run: Path, keep_every: int | None = None) -> None:
    """Delete all checkpoints except the best, the last, and the one before it, in case the last is damaged later.

    Checkpoints whose step is a multiple of `keep_every` are kept, except that of step 0. If one cannot be read or deleted, the
    rest are kept too.
    """
    try:
        keep = {best_checkpoint(run), *list_checkpoints(run)[-2:]}
        for checkpoint in list_checkpoints(run):
            step = checkpoint_step(checkpoint)
            wanted = keep_every is not None and step > 0 and step % keep_every == 0
            if checkpoint not in keep and not wanted:
                aside = partial_path(checkpoint)
                checkpoint.rename(aside)  # so that a kill during the deletion leaves no incomplete checkpoint
                shutil.rmtree(aside, ignore_errors=True)
    except (LineartimeError, OSError):
        return


def remove_partial(run: Path) -> None:
    """Delete what a killed process of the run left half written or half deleted; the caller holds the run's lock.

    Commands that write a folder or a file of their own into the run's folder do not hold it, so that theirs are left to age.
    """
    for partial in run.glob("*.partial"):
        if re.fullmatch(r"\.step-.*|[^.].*\.[0-9a-f]{32}\.partial", partial.name):  # of checkpoints, and `write_atomically`
            remove(partial)
    remove_abandoned(run, r"\..+\.[0-9a-f]{32}\.partial(\..+)?")
