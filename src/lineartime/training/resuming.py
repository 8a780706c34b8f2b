"""Options that come from elsewhere: a run that goes on, a run to repeat, a recipe."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from lineartime.checkpoint import is_checkpoint, last_checkpoint, last_whole_checkpoint, read_training_state
from lineartime.errors import LineartimeError
from lineartime.models.presets import PRESETS
from lineartime.training.config import TrainConfig, flag
from lineartime.training.recipes import recipe_config

_MAY_CHANGE = (
    "data",  # another path to the same text, which is checked
    "device",
    "precision",
    "compile",
    "recompute",
    "batch_size",
    "parallel",
    "context_parallel",
    "timeout",
    "track",
    "cache",
    "out",
    "resume",
    "max_skipped",
)
"""Options that may be others when a run is resumed: it may have moved to another machine, or to more of them."""

Reparse = Callable[[TrainConfig], TrainConfig]
"""Reads the command line again, with these options for defaults."""


def saved_config(checkpoint: Path) -> TrainConfig:
    """The options that the run of a checkpoint was started with; LineartimeError if they cannot be read."""
    try:
        return TrainConfig.from_dict(read_training_state(checkpoint).config)
    except ValueError as error:
        raise LineartimeError(f"The options in {checkpoint} are not of this version of lineartime: {error}") from None


def resumed_config(asked: TrainConfig, started: TrainConfig, left_out: TrainConfig) -> TrainConfig:
    """The options of a run that goes on: its own, and those asked for where they may be others.

    Args:
        asked: the options now.
        started: the options of the run.
        left_out: what an option is now if nobody asked for it.

    Raises:
        LineartimeError: naming the option, if it is asked to differ from the run's and must not.
    """
    values = {}
    for field in dataclasses.fields(TrainConfig):
        new, old = getattr(asked, field.name), getattr(started, field.name)
        if field.name in ("out", "resume") or (new != getattr(left_out, field.name) and field.name in _MAY_CHANGE):
            values[field.name] = new
        elif new not in (old, getattr(left_out, field.name)):
            raise LineartimeError(
                f"{flag(field.name)} is {_shown(new)}, but the run in {asked.run_directory} was started with {_shown(old)}: "
                "leave the option out to resume it, or start another run in another --out."
            )
    return dataclasses.replace(started, **values)


def complete(config: TrainConfig, reparse: Reparse) -> tuple[TrainConfig, TrainConfig]:
    """The options of a command line, where --resume, --like or --recipe give other defaults than the usual ones.

    Returns:
        The options, and what they are where nobody asked for anything.

    Raises:
        LineartimeError: if they contradict each other, or the run they name cannot be read.
    """
    chosen = [flag(name) for name in ("resume", "like", "recipe") if getattr(config, name)]
    if len(chosen) > 1:
        raise LineartimeError(f"{' and '.join(chosen)} cannot go together: each gives all other options; use one of them.")
    defaults = TrainConfig()
    if config.resume and not is_checkpoint(config.run_directory):
        last, _ = last_whole_checkpoint(config.run_directory)
        defaults = dataclasses.replace(saved_config(last), out=config.run_directory, resume=True)
        # The folder follows from other options, which may not have been given again.
        config = dataclasses.replace(reparse(defaults), out=config.run_directory)
    elif config.like is not None:
        like = config.like if is_checkpoint(config.like) else last_checkpoint(config.like)
        defaults = dataclasses.replace(saved_config(like), out=None, resume=False, recipe=None, like=config.like)
        config = reparse(defaults)
    elif config.recipe is not None and config.preset in PRESETS:  # `prepare` complains of others
        defaults = recipe_config(config.recipe, config.preset)
        asked = reparse(defaults)
        both = asked.override if asked.override == defaults.override else (*defaults.override, *asked.override)
        config = dataclasses.replace(asked, override=both)
    return config, defaults


def _shown(value: object) -> str:
    """A value as it stands on the command line."""
    return "nothing" if value in (None, ()) else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
