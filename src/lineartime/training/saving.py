"""Save and resume: the options and the checkpoint that a run starts from, its folder, and the checkpoints that it writes.

The weights go into one safetensors file, which any program can read. Each process writes its part of the optimiser's moments
with torch.distributed.checkpoint, in its safetensors format, from which any number of processes can read them back.
"""

import dataclasses
import shutil
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lineartime import checkpoint as checkpoints
from lineartime.checkpoint import NoCheckpointError, TrainingState, checkpoint_path, list_checkpoints, prune
from lineartime.checkpoint.format import OPTIMIZER_FOLDER, partial_path, write_files
from lineartime.data import Tokenizer
from lineartime.errors import ArgumentError, LineartimeError, first_line, reporting_file_errors
from lineartime.files import is_folder, is_there, os_error_behind, synchronise, synchronise_folder
from lineartime.models.language_model import LanguageModel
from lineartime.models.systems import PRESETS, resolve
from lineartime.runs.record import last_error, locked, read_record
from lineartime.training.config import TrainConfig, merged_override, options_of, recipe_config, with_other_steps
from lineartime.training.optimizers import ModelOptimizer
from lineartime.training.parallel import World

_MAY_CHANGE = (
    "data",  # another path to the same encoded text, which is checked
    "text_column",
    "include",
    "exclude",
    "device",
    "precision",
    "threads",
    "compile",
    "recompute",
    "batch_size",
    "parallel",
    "context_parallel",
    "timeout",
    "track",
    "cache",
    "max_skipped",
    "keep_every",
    "max_time",
)
"""Options that may differ when a run is resumed: it may have moved to other or more machines."""

_LENGTHS = ("steps", "decay_steps")
"""Options that may differ as long as the steps taken would have had the same learning rates."""


def saved_config(checkpoint: Path) -> TrainConfig:
    """The options with which a checkpoint's run was started. Raises LineartimeError if they cannot be read."""
    state = checkpoints.read_training_state(checkpoint)
    try:
        return TrainConfig.from_dict(state.config)
    except ValueError as error:
        raise LineartimeError(
            f"The options in {checkpoint} come from another version of lineartime, or are damaged: {error}"
        ) from None


def resumed_config(asked: TrainConfig, started: TrainConfig, given: Collection[str], taken: int) -> TrainConfig:
    """The options of a resumed run after `taken` steps: those it was `started` with, and those `given` now that may differ.

    `asked` holds the values of the options that are given, by their names. Raises ArgumentError if one differs and must not.
    """
    lengths = {name: getattr(asked, name) for name in _LENGTHS if name in given}
    if any(value != getattr(started, name) for name, value in lengths.items()):
        started = with_other_steps(started, dataclasses.replace(started, **lengths), taken)
    kept = {name: getattr(asked, name) for name in ("out", "resume", "auto_resume")}
    for name in given:
        value, before = getattr(asked, name), getattr(started, name)
        if name in _MAY_CHANGE:
            kept[name] = value
        elif name not in kept and name not in lengths:
            if name == "tokenizer":  # None means this
                before = before or "bytes"
            if value != before:
                raise ArgumentError(
                    name,
                    f"is {_shown(value)}, but the run in {asked.run_directory} was started with {_shown(before)}: leave the "
                    "option out to resume it, or start another run in another folder.",
                )
    return dataclasses.replace(started, **kept)


def complete(given: Mapping[str, Any]) -> TrainConfig:
    """The options that are given, by their names, and for the others the defaults that `resume` or `recipe` select.

    Raises LineartimeError if they contradict each other, or the run they name cannot be read.
    """
    config = TrainConfig(**given)
    if config.auto_resume and not config.resume:
        if config.out is None:
            raise ArgumentError("auto_resume", "needs the folder of the run: give `out`.")
        if checkpoints.list_checkpoints(config.out):
            return _resumed_again(config.out, config, given)
    if config.resume and config.init_from is not None:
        combined = ("starts a new run, and cannot be combined with ", "`resume`", ": use one of them.")
        raise ArgumentError("init_from", *combined)
    if config.resume and config.recipe is not None:
        raise ArgumentError("resume", "cannot be combined with `recipe`: each sets all other options; use one of them.")
    if config.resume and not checkpoints.is_checkpoint(config.run_directory):
        # The folder may depend on other options, which need not be given again.
        return dataclasses.replace(_applied(_resumed(config.run_directory), given), out=config.run_directory)
    defaults = TrainConfig()
    if config.recipe is not None and config.preset in PRESETS:  # `TrainConfig.model_config` reports unknown presets
        defaults = recipe_config(config.recipe, config.preset if "preset" in given else None)
        config = _applied(defaults, given)
    if config.init_from is not None:
        try:
            defaults = checkpoints.read_from(config.init_from, lambda checkpoint: _with_model_of(checkpoint, defaults))
        except NoCheckpointError as error:
            raise ArgumentError("init_from", f"is {config.init_from}, which {error.problem}: {error.advice}.") from None
        config = dataclasses.replace(_applied(defaults, given), init_from=defaults.init_from)
    return config


def _applied(defaults: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """Apply the given options to defaults, and merge `override` field by field.

    If another preset is given, default overrides of fields that its model does not have are dropped.
    """
    asked = dataclasses.replace(defaults, **{"override": (), **given})
    inherited = defaults.override
    if asked.preset != defaults.preset and asked.preset in PRESETS:  # `TrainConfig.model_config` reports unknown presets
        fields = resolve(asked.preset, asked.task).override_names
        inherited = tuple(item for item in inherited if item.partition("=")[0].rpartition(".")[2] in fields)
    return dataclasses.replace(asked, override=merged_override(inherited, asked.override))


def _resumed(run: Path) -> TrainConfig:
    return dataclasses.replace(saved_config(checkpoints.last_checkpoint(run)), out=run, resume=True)


def _resumed_again(run: Path, config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """`complete` for a run that has begun, and whose command is given again, with what the run began with."""
    defaults = _resumed(run)
    began_with = {name: getattr(defaults, name) for name in ("recipe", "init_from")}
    for name, before in began_with.items():
        value = getattr(config, name)
        # The weights of a run are recorded with the checkpoint that they were taken from.
        if value is not None and (before is None or not Path(before).absolute().is_relative_to(Path(value).absolute())):
            what = f"is {value}, but the run in {run} began with {_shown(before)}: use that, or give another "
            raise ArgumentError(name, what, "`out`.")
    return dataclasses.replace(_applied(defaults, given), **began_with)


def _with_model_of(checkpoint: Path, defaults: TrainConfig) -> TrainConfig:
    """These defaults, with a checkpoint's model and tokenizer. Raises LineartimeError if no run can have such a model."""
    options, place = options_of(checkpoints.read_model_config(checkpoint), "clm", all_values=False), checkpoint.absolute()
    del options["override"]["vocab_size"]  # follows from the tokenizer
    return dataclasses.replace(defaults, **options, tokenizer=str(place), init_from=place)


def _shown(value: object) -> str:
    return "nothing" if value in (None, ()) else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_folder(config: TrainConfig) -> None:
    """Raise ArgumentError for a path that cannot be the folder of a run."""
    run = config.run_directory
    if checkpoints.is_checkpoint(run):
        raise ArgumentError("out", f"is {run}, which is a checkpoint: give the folder of its run, or a new one.")
    if is_there(run) and not is_folder(run):
        raise ArgumentError("out", f"is {run}, which is a file: give a folder.")


@contextmanager
def locked_run(config: TrainConfig, world: World) -> Iterator[None]:
    """Lock a run's folder against other processes of this machine. Raises LineartimeError if it cannot be used."""
    with ExitStack() as held:
        with world.raise_on_all_ranks():
            check_folder(config)
            if world.is_main:
                held.enter_context(locked(config.run_directory, keep=True))
        yield


def starting_point(config: TrainConfig) -> Path | None:
    """The checkpoint to start from, if any. Removes what killed processes left behind."""
    run = config.run_directory
    if config.resume:
        checkpoints.remove_partial(run)
        return checkpoints.last_checkpoint(run)
    if checkpoints.list_checkpoints(run):
        failed = None
        with suppress(LineartimeError):  # a record that is missing or damaged
            failed = last_error(read_record(run))
        resume, out = "`resume=True`", "`out`"
        if failed is None:
            raise LineartimeError(f"{run} already holds a run: resume it with ", resume, ", or give another ", out, ".")
        what = f"{run} already holds a run, which failed ({failed.rstrip('.')}): give another "
        raise LineartimeError(what, out, ", or resume it with ", resume, " if the cause is gone.")
    checkpoints.remove_partial(run)
    return None


def check_shared(run: Path, world: World) -> None:
    """Raise LineartimeError unless all processes see the same folder, where each writes its part of a checkpoint."""
    if world.size == 1:
        return
    sign = run / world.share(lambda: f".seen-by-all-{uuid4().hex}")  # a copy of the folder holds all other files
    with world.raise_on_all_ranks(), reporting_file_errors("write", run):
        if world.is_main:
            sign.touch()
    [missing] = world.sum(not sign.exists())
    if world.is_main:
        sign.unlink(missing_ok=True)
    if missing:
        found = f"is {run}, which is not the same folder for {missing:.0f} of the {world.size} processes"
        raise world.reported_by_main(ArgumentError("out", f"{found}: give a folder on a disk that all machines share."))


class CheckpointWriter:
    """Writes the checkpoints of a run in the background, one at a time.

    Every process of the run has a writer. All of them must call `begin` and `finish` together.
    """

    def __init__(
        self,
        run: Path,
        model: LanguageModel,
        optimizer: ModelOptimizer,
        tokenizer: Tokenizer,
        world: World,
        keep_every: int | None = None,
    ) -> None:
        self._run = run
        self._keep_every = keep_every
        self._model = model
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._world = world
        self._thread: threading.Thread | None = None
        self._target = run
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether writing the current checkpoint has failed; `finish` raises the error."""
        return self._error is not None

    def begin(self, state: TrainingState) -> None:
        """Copy the contents of a checkpoint and write it in the background. Raises as `finish` for the previous checkpoint."""
        self.finish()
        self._target = checkpoint_path(self._run, state.step)
        partial = partial_path(self._target)
        with self._world.raise_on_all_ranks(), self._reporting():
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        weights = _whole(self._model.state_dict(), keep=self._world.is_main)
        writing = self._write_moments(partial)
        self._thread = threading.Thread(target=self._complete, args=(writing, weights, state, partial), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the checkpoint is on disk. Raises LineartimeError if it could not be written; others are kept."""
        if self._thread is None:
            return
        self.wait()
        self._thread = None
        error, self._error = self._error, None
        try:
            with self._world.raise_on_all_ranks(), self._reporting():
                if error is not None:
                    raise error
        except Exception:
            if self._world.is_main:
                shutil.rmtree(partial_path(self._target), ignore_errors=True)
            raise

    def wait(self) -> None:
        """Wait until this process has finished writing. A single process may call this alone."""
        if self._thread is not None:
            self._thread.join()

    def _reporting(self) -> AbstractContextManager[None]:
        then = ("resume the run with ", "`resume=True`") if list_checkpoints(self._run) else ("train again",)
        return reporting_file_errors("write", f"the checkpoint {self._target}", *then)

    def _write_moments(self, partial: Path) -> "Future[Any] | None":
        moments = self._optimizer.moments()
        if not moments:  # before the first step
            return None
        dcp = _engine()
        writer = dcp.HuggingFaceStorageWriter(str(partial / OPTIMIZER_FOLDER), save_distributed=True)
        group, alone = self._world.checkpoint_group, self._world.size == 1
        future: Future[Any] = dcp.async_save(moments, storage_writer=writer, process_group=group, no_dist=alone)
        return future

    def _complete(self, writing: "Future[Any] | None", weights: dict[str, Tensor], state: TrainingState, partial: Path) -> None:
        """Wait for the parts of all processes. The main process then adds its files and makes the checkpoint visible."""
        try:
            if writing is not None:
                writing.result()
            if not self._world.is_main:
                return
            write_files(partial, weights, self._model.config, self._tokenizer, state)
            synchronise_folder(partial)
            partial.rename(self._target)
            synchronise(self._run)
        except BaseException as error:  # `finish` raises it in the main thread
            self._error = _cause(error)
        else:
            prune(self._run, self._keep_every)


def restore_moments(checkpoint: Path, optimizer: ModelOptimizer, step: int, world: World) -> None:
    """Load the moments of a checkpoint into an optimiser that has taken `step` steps. Each process loads its part.

    Raises LineartimeError if they are damaged, or are not those of this optimiser.
    """
    folder = checkpoint / OPTIMIZER_FOLDER
    if not folder.is_dir():
        if step:  # otherwise it was written before the first step
            raise _unusable(checkpoint, f"{OPTIMIZER_FOLDER} is missing")
        return
    from torch.distributed.checkpoint.api import CheckpointException

    dcp = _engine()
    optimizer.start_at(step)
    moments = optimizer.moments()
    try:
        dcp.load(moments, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1)
    except dist.DistError:  # another process is lost
        raise
    # Damaged files make PyTorch and safetensors raise many kinds of errors.
    except (Exception, CheckpointException) as error:
        raise _unusable(checkpoint, first_line(_cause(error))) from None


def _unusable(checkpoint: Path, why: str) -> LineartimeError:
    what = f"The optimiser's part of the checkpoint {checkpoint} is damaged, or of another optimiser ({why.rstrip('.')}): "
    new = ("restore it from a copy, or start another run from its weights with ", f"`init_from={str(checkpoint)!r}`", ".")
    return LineartimeError(what, *new)


def _engine() -> Any:
    """Import torch.distributed.checkpoint, late because it is slow, and silence its warning about a single process."""
    from torch.distributed import checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return dcp


def _whole(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Copies of tensors on the CPU, gathered from their parts; empty unless `keep`."""
    copies = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # every process must call it
        if keep:
            copies[name] = whole.detach().to("cpu", copy=True)
    return copies


def _cause(error: BaseException) -> BaseException:
    """The system error that an error of torch.distributed.checkpoint or safetensors wraps."""
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()]
        error = next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
    return os_error_behind(error) if isinstance(error, SafetensorError) else error
