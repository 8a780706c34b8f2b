"""The folder of a run: whether it may be used, and what in it there is to go on from."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lineartime import checkpoint as checkpoints
from lineartime.errors import LineartimeError, cannot
from lineartime.runs.claim import LOCK_FILE, claim
from lineartime.training.config import TrainConfig
from lineartime.training.distributed import World


@contextmanager
def claimed(config: TrainConfig, world: World) -> Iterator[None]:
    """Keep others, of this machine at least, out of the folder of a run; LineartimeError if one is in there already."""
    run = config.run_directory
    wrong = not run.is_dir() if run.exists() or config.resume else False
    if wrong or checkpoints.is_checkpoint(run):  # of which `starting_point` complains
        yield
        return
    lock: list[IO[str]] = []
    world.share(lambda: lock.append(claim(run)))
    try:
        yield
    finally:
        for file in lock:
            file.close()
            if [path.name for path in run.iterdir()] == [LOCK_FILE]:  # nothing came of it
                (run / LOCK_FILE).unlink()
                run.rmdir()


def starting_point(config: TrainConfig) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, if any, and what there is to say about it; leaves the run's folder clean."""
    run = config.run_directory
    if checkpoints.is_checkpoint(run):
        raise LineartimeError(f"--out {run} is a checkpoint: give the folder of the run, or a new one.")
    if run.exists() and not run.is_dir():
        raise LineartimeError(f"--out {run} is a file: give a folder.")
    if not config.resume:
        if checkpoints.list_checkpoints(run):
            raise LineartimeError(f"{run} already holds a run: go on with it by --resume, or choose another folder with --out.")
        checkpoints.remove_partial(run)
        return None, []
    last, wrong = checkpoints.last_whole_checkpoint(run)
    for damaged in wrong:
        checkpoints.set_aside(damaged)
    checkpoints.remove_partial(run)
    return last, [f"{what}: going on from {last.name}." for what in wrong.values()]


def check_shared(run: Path, world: World) -> None:
    """Raise LineartimeError unless all processes see the same folder, which each of them writes parts of checkpoints to."""
    if world.size == 1:
        return
    sign = run / f".seen-by-all-{os.getpid()}"
    name = world.share(lambda: _leave(sign))
    [missing] = world.sum(not (run / name).exists())
    if world.is_main:
        sign.unlink(missing_ok=True)
    if missing:
        raise LineartimeError(
            f"--out {run} is not the same folder for {missing:.0f} of the {world.size} processes: give a folder on a disk that "
            "all machines share."
        )


def _leave(sign: Path) -> str:
    try:
        sign.parent.mkdir(parents=True, exist_ok=True)
        sign.touch()
    except OSError as error:
        raise cannot("write", sign.parent, error) from None
    return sign.name
