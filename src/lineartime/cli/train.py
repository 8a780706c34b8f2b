"""`lineartime train`: train a model, or resume a run."""

import dataclasses
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from lineartime.cli.config_file import read_options, to_toml
from lineartime.errors import ArgumentError
from lineartime.screen import SCREEN
from lineartime.training.config import TrainConfig

_ALIASES = {"model": "preset", "context": "context_length"}


@dataclass(frozen=True)
class TrainOptions(TrainConfig):
    """The options of `lineartime train`."""

    preset: Annotated[str, tyro.conf.arg(name="model", aliases=["--preset"])] = TrainConfig.preset
    context_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = TrainConfig.context_length
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.data
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.include
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.exclude
    config: Path | None = None
    """Take options from this TOML, YAML or JSON file, by the same names; options given here take precedence."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only print all options as TOML, for --config."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only take three steps, and print sizes, memory and the time that the whole run would take; nothing is saved."""

    def __post_init__(self) -> None:
        """Leave the checks to `TrainConfig`: tyro would show its errors as those of the parser."""


def run(options: TrainOptions, arguments: Sequence[str]) -> None:
    """Train, then print the best checkpoint."""
    for name in ("resume", "auto_resume"):
        if options.dry_run and getattr(options, name):
            raise ArgumentError("dry_run", f"tries a new run, and cannot be combined with `{name}=True`.")

    from lineartime.training.config import merged_override
    from lineartime.training.saving import complete

    given = {} if options.config is None else read_options(options.config)
    override = merged_override(given.get("override", ()), options.override)
    given |= {name: getattr(options, name) for name in _named(arguments)}
    if "override" in given:
        given["override"] = override
    config = complete(given)
    if options.print_config:
        config.check()
        expanded = {**config.to_dict(), "resume": options.resume}
        del expanded["recipe"]  # it would replace options that are None
        print(to_toml(expanded), end="")
    elif options.dry_run:
        from lineartime.bench.dry_run import dry_run

        print("\n".join(dry_run(config)))
    else:
        _train(config, given)


def _train(config: TrainConfig, given: Collection[str]) -> None:
    from lineartime.training.loop import train_completed
    from lineartime.training.parallel import read_environment

    result = train_completed(config, given)
    if read_environment().rank == 0:
        if not result.finished:
            print(f"resume by: {_resume_command(result.run)}", file=SCREEN)
        print(f"best checkpoint: {result.checkpoint}")


def _named(arguments: Sequence[str]) -> list[str]:
    """The options of training that the arguments give, whatever their values are."""
    words = {word.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for word in arguments if word.startswith("--")}
    named = {_ALIASES.get(word, word) for word in words}
    return [field.name for field in dataclasses.fields(TrainConfig) if field.name in named]


def _resume_command(run: Path) -> str:
    from lineartime.models.systems import imported_names
    from lineartime.training.parallel import read_environment

    imports = "".join(f" --import {shlex.quote(name)}" for name in imported_names())
    start, environment = "lineartime", read_environment()
    if environment.world_size > 1:
        start = f"torchrun --nproc-per-node {environment.local_world_size} -m lineartime"
    return f"{start} train --resume --out {shlex.quote(str(run))}{imports}"
