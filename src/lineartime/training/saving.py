"""Save and resume: the options and the checkpoint that a run starts from, and the checkpoints that it writes.

The main process gathers the weights and the moments of the optimiser and writes them as safetensors, which any program can
read; any number of processes can resume from them.
"""

import dataclasses
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lineartime import checkpoint as checkpoints
from lineartime.checkpoint import (
    OPTIMIZER_FOLDER,
    NoCheckpointError,
    TrainingState,
    checkpoint_path,
    list_checkpoints,
    partial_path,
    prune,
    write_files,
)
from lineartime.data import Tokenizer
from lineartime.errors import ArgumentError, LineartimeError, first_line, reporting_file_errors
from lineartime.files import is_folder, is_there, synchronise, synchronise_folder
from lineartime.models.language_model import LanguageModel
from lineartime.models.systems import PRESETS
from lineartime.training.config import TrainConfig, merged_override, options_of, recipe_config, with_other_steps
from lineartime.training.optimizers import ModelOptimizer
from lineartime.training.parallel import World, read_environment

_TEXT = ("data", "text_column", "include", "exclude", "raw_ids", "cache")  # other paths to the same text, which is checked
_MACHINE = ("device", "precision", "threads", "compile", "recompute", "batch_size", "parallel", "context_parallel")
_RUN = ("timeout", "track", "max_skipped", "keep_every", "max_time", "out", "resume", "auto_resume")
_MAY_CHANGE = (*_TEXT, *_MACHINE, *_RUN)
"""Options that may differ when a run is resumed: it may have moved to other or more machines."""

_LENGTHS = ("steps", "decay_steps")
"""Options that may differ as long as the steps taken would have had the same learning rates."""


def complete(given: Mapping[str, Any]) -> TrainConfig:
    """The options that are given, by their names, and for the others the defaults of a resumed run, `recipe` or `init_from`.

    Raises LineartimeError if they contradict each other, or the run they name cannot be read.
    """
    config = TrainConfig(**given)
    run = config.run_directory
    if checkpoints.is_checkpoint(run):
        raise ArgumentError("out", f"is {run}, which is a checkpoint: give the folder of its run, or a new one.")
    if is_there(run) and not is_folder(run):
        raise ArgumentError("out", f"is {run}, which is a file: give a folder.")
    if config.auto_resume and not config.resume and config.out is None:
        raise ArgumentError("auto_resume", "needs the folder of the run: give `out`.")
    if config.resume and (config.init_from is not None or config.recipe is not None):
        name = "init_from" if config.recipe is None else "recipe"
        raise ArgumentError(name, "starts a new run, and cannot be combined with `resume`: use one of them.")
    again = config.auto_resume or read_environment().torchelastic_restart_count > 0  # torchrun has replaced a lost process
    if config.resume or (again and config.out is not None and list_checkpoints(run)):
        return _resumed(run, given)
    chosen = given
    defaults = TrainConfig()
    if config.recipe is not None and config.preset in PRESETS:  # `TrainConfig.model_config` reports unknown presets
        defaults = recipe_config(config.recipe, config.preset if "preset" in given else None)
    if config.init_from is not None:
        try:
            start = checkpoints.find_checkpoint(config.init_from).absolute()
        except NoCheckpointError as error:
            raise ArgumentError("init_from", f"is {config.init_from}, which {error.problem}: {error.advice}.") from None
        if config.tokenizer not in (None, str(start)):
            found = f"is {config.tokenizer}, but the model of `init_from` brings the tokens that it has learnt"
            raise ArgumentError("tokenizer", f"{found}: leave it out.")
        model = options_of(checkpoints.read_model_config(start), "clm", all_values=False)
        del model["override"]["vocab_size"]  # follows from the tokenizer
        if given.get("preset", model["preset"]) != model["preset"]:  # that another preset fits is not made by overrides
            model["override"] = ()
        defaults = dataclasses.replace(defaults, **model, tokenizer=str(start))
        chosen = {**given, "init_from": start}
    asked = _applied(defaults, chosen)  # whose preset names the folder
    return _resumed(asked.run_directory, given) if again and list_checkpoints(asked.run_directory) else asked


def _applied(defaults: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Apply the given options to defaults, and merge `override` field by field."""
    asked = dataclasses.replace(defaults, **{"override": (), **given})
    return dataclasses.replace(asked, override=merged_override(defaults.override, asked.override))


def _resumed(run: Path, given: Mapping[str, Any]) -> TrainConfig:
    """The options with which a run was started, and those given now that may differ. Raises ArgumentError for others."""
    try:
        last = checkpoints.last_checkpoint(run)
    except NoCheckpointError as error:
        raise ArgumentError("out", f"is {run}, which {error.problem}: give the folder of the run to resume.") from None
    started = saved_config(last)
    asked = dataclasses.replace(_applied(started, given), out=run, resume=True)
    for name in given:
        value, before = getattr(asked, name), getattr(started, name)
        if name == "tokenizer":  # None means this
            before = before or "bytes"
        same = value == before
        if name == "init_from" and before is not None:  # recorded with the checkpoint that the weights were taken from
            same = Path(before).is_relative_to(Path(value).absolute())
        if not same and name not in (*_MAY_CHANGE, *_LENGTHS):
            found = f"is {value}, but the run in {run} was started with {before}"
            raise ArgumentError(name, f"{found}: leave it out to resume that run, or give another folder, `out`.")
    if any(getattr(asked, name) != getattr(started, name) for name in _LENGTHS):
        started = with_other_steps(started, asked, checkpoints.read_training_state(last).step)
    changed = {name: getattr(asked, name) for name in _MAY_CHANGE}
    return dataclasses.replace(started, **changed)


def saved_config(checkpoint: Path) -> TrainConfig:
    """The options with which a checkpoint's run was started. Raises LineartimeError if they cannot be read."""
    state = checkpoints.read_training_state(checkpoint)
    try:
        return TrainConfig.from_dict(state.config)
    except ValueError as error:
        raise LineartimeError(
            f"The options in {checkpoint} come from another version of lineartime, or are damaged: {error}"
        ) from None


def starting_point(config: TrainConfig) -> Path | None:
    """The checkpoint to start from, if any. Removes what killed processes left behind."""
    run = config.run_directory
    if not config.resume and list_checkpoints(run):
        raise LineartimeError(f"{run} already holds a run: resume it with `resume=True`, or give another `out`.")
    checkpoints.remove_partial(run)
    return checkpoints.last_checkpoint(run) if config.resume else None


class CheckpointWriter:
    """Writes the checkpoints of a run in the background, one at a time.

    Every process of the run has a writer, and all of them must call `begin` together. That of the main process writes.
    """

    def __init__(
        self, config: TrainConfig, model: LanguageModel, optimizer: ModelOptimizer, tokenizer: Tokenizer, world: World
    ) -> None:
        self._run = config.run_directory
        self._keep_every = config.keep_every
        self._model = model
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._is_main = world.is_main
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, state: TrainingState) -> None:
        """Copy the contents of a checkpoint and write it in the background. Raises as `finish` for the previous checkpoint."""
        self.finish()
        weights = _whole(self._model.state_dict(), keep=self._is_main)
        moments = _whole(self._optimizer.moments(), keep=self._is_main)
        if self._is_main:
            self._thread = threading.Thread(target=self._write, args=(weights, moments, state), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is written, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait until the checkpoint is on disk. Raises LineartimeError if it could not be written; others are kept."""
        self.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise LineartimeError if a checkpoint could not be written."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, weights: dict[str, Tensor], moments: dict[str, Tensor], state: TrainingState) -> None:
        target = checkpoint_path(self._run, state.step)
        partial = partial_path(target)
        try:
            then = "resume the run with `resume=True`" if list_checkpoints(self._run) else "train again"
            with reporting_file_errors("write", f"the checkpoint {target}", then):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                write_files(partial, weights, self._model.config, self._tokenizer, state, moments)
                synchronise_folder(partial)
                partial.rename(target)
                synchronise(self._run)
            prune(self._run, self._keep_every)
        except BaseException as error:  # `finish` raises it in the main thread
            shutil.rmtree(partial, ignore_errors=True)
            self._error = error


def restore_moments(checkpoint: Path, optimizer: ModelOptimizer, step: int) -> None:
    """Load the moments of a checkpoint into an optimiser that has taken `step` steps. Each process loads its part.

    Raises LineartimeError if they are damaged, or are not those of this optimiser.
    """
    folder = checkpoint / OPTIMIZER_FOLDER
    if step == 0 and not folder.is_dir():  # it was written before the first step
        return
    optimizer.start_at(step)
    try:
        files: list[Any] = [safe_open(file, framework="pt") for file in folder.glob("*.safetensors")]
        # The first runs wrote a file in each process, whose metadata tells where its parts of the tensors begin.
        places = [json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}")) for file in files]
        for name, moment in optimizer.moments().items():
            whole, found = torch.empty(moment.shape, dtype=moment.dtype, device="cpu"), 0
            for file, begins in zip(files, places, strict=True):
                if name in file.keys():  # noqa: SIM118  # it is not a dict
                    part = file.get_tensor(name)
                    begin = begins[name]["saved_offsets"] if name in begins else [0] * part.dim()
                    whole[tuple(slice(i, i + n) for i, n in zip(begin, part.shape, strict=True))] = part
                    found += part.numel()
            if found != moment.numel():
                raise ValueError(f"{name} has {found:,} numbers, but needs {moment.numel():,}")
            whole = whole.to(moment.device)
            if isinstance(moment, DTensor):
                whole = distribute_tensor(whole, moment.device_mesh, moment.placements, src_data_rank=None)
            moment.copy_(whole)
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError) as error:
        why = first_line(error).rstrip(".") if folder.is_dir() else f"{OPTIMIZER_FOLDER} is missing"
        what = f"The optimiser's part of the checkpoint {checkpoint} is damaged, or of another optimiser ({why})"
        new = f"start another run from its weights with `init_from={checkpoint}`"
        raise LineartimeError(f"{what}: restore it from a copy, or {new}.") from None


def _whole(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Copies of tensors on the CPU, gathered from their parts; empty unless `keep`."""
    copies = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # every process must call it
        if keep:
            copies[name] = whole.detach().to("cpu", copy=True)
    return copies
