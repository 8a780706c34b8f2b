"""The folder of a run: whether it can be used, and which of its checkpoints to start from."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lineartime import checkpoint as checkpoints
from lineartime.errors import Argument, ArgumentError, LineartimeError
from lineartime.files import is_folder, is_there
from lineartime.runs.lock import LOCK_FILE, lock_run
from lineartime.runs.record import last_error, read_record
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World


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
    run = config.run_directory
    lock = None
    with world.raise_on_all_ranks():
        check_folder(config)
        existed = is_there(run)
        if config.resume and not existed:
            raise ArgumentError("out", f"is {run}, where there is no run to resume: give the folder of the run.")
        if world.is_main:
            lock = lock_run(run)
    try:
        yield
    finally:
        if lock is not None:
            # A process that opens the file before it is deleted cannot lock it yet. Windows deletes no open file.
            with lock, suppress(OSError):
                if [path.name for path in run.iterdir()] == [LOCK_FILE]:  # the run failed before it wrote anything
                    (run / LOCK_FILE).unlink()
                    if not existed:
                        run.rmdir()


def starting_point(config: TrainConfig) -> tuple[Path | None, list[str]]:
    """The checkpoint to start from, if any, and notes for the user. Removes what killed processes left behind."""
    run = config.run_directory
    if config.resume:
        last, wrong = checkpoints.last_whole_checkpoint(run)
        for damaged in wrong:
            checkpoints.set_aside(damaged)
        checkpoints.remove_partial(run)
        return last, [f"{what}: resuming from {last.name}." for what in wrong.values()]
    if checkpoints.list_checkpoints(run):
        failed = None
        with suppress(LineartimeError):  # a record that is missing or damaged
            failed = last_error(read_record(run))
        resume, out = Argument("resume", True), Argument("out")
        if failed is None:
            raise LineartimeError(f"{run} already holds a run: resume it with ", resume, ", or give another ", out, ".")
        what = f"{run} already holds a run, which failed ({failed.rstrip('.')}): give another "
        raise LineartimeError(what, out, ", or resume it with ", resume, " if the cause is gone.")
    checkpoints.remove_partial(run)
    return None, []


def check_shared(run: Path, world: World) -> None:
    """Raise LineartimeError unless all processes see the locked folder, where each writes its part of a checkpoint."""
    [missing] = world.sum(not (run / LOCK_FILE).exists())
    if missing:
        found = f"is {run}, which is not the same folder for {missing:.0f} of the {world.size} processes"
        raise world.reported_by_main(ArgumentError("out", f"{found}: give a folder on a disk that all machines share."))
