"""Write checkpoints in the background of training, and restore the optimiser's moments.

The weights go into one safetensors file, which any program can read. Each process writes its part of the optimiser's moments
with torch.distributed.checkpoint, in its safetensors format, from which any number of processes can read them back.
"""

import shutil
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lineartime.checkpoint import TrainingState, checkpoint_path, list_checkpoints, prune
from lineartime.checkpoint.format import OPTIMIZER_FOLDER, partial_path, write_files
from lineartime.data import Tokenizer
from lineartime.errors import LineartimeError, first_line, reporting_file_errors
from lineartime.files import os_error_behind, synchronise, synchronise_folder, utf8_path
from lineartime.models.language_model import LanguageModel
from lineartime.training.optimizers import ModelOptimizer
from lineartime.training.parallel import World


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
        with utf8_path(folder) as path:
            dcp.load(moments, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=world.size == 1)
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
