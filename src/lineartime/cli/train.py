"""`lineartime train`: train a model, or resume a run.

A file may hold options, over which the command line takes precedence:

preset = "flash-tiny"          # TOML; YAML and JSON work as well
data = ["books/", "wiki.txt"]
learning-rate = 0.003          # or learning_rate
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro

from lineartime.errors import ArgumentError, LineartimeError, missing_extra, reporting_file_errors
from lineartime.screen import SCREEN
from lineartime.training.config import TrainConfig, merged_override

_SHORT = {"model": "preset", "context": "context_length"}
"""Other names of options, on the command line and in files."""
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


@dataclass(frozen=True)
class TrainOptions(TrainConfig):
    """The options of `lineartime train`."""

    preset: Annotated[str, tyro.conf.arg(aliases=["--model"])] = TrainConfig.preset
    context_length: Annotated[int, tyro.conf.arg(aliases=["--context"])] = TrainConfig.context_length
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.data
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.include
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = TrainConfig.exclude
    config: Path | None = None
    """Take options from this TOML, YAML or JSON file, by the same names; options given here take precedence."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Only print all options as TOML, for --config."""


def run(options: TrainOptions, arguments: Sequence[str]) -> None:
    """Train, then print the best checkpoint."""
    from lineartime.training.setup import complete

    given = {} if options.config is None else read_options(options.config)
    flags = {word.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for word in arguments if word.startswith("--")}
    named = {_SHORT.get(flag, flag) for flag in flags}
    typed = {field.name: getattr(options, field.name) for field in dataclasses.fields(TrainConfig) if field.name in named}
    override = merged_override(given.get("override", ()), options.override)  # as on top of a recipe's
    config = complete({**given, **typed, "override": override})
    if options.print_config:
        config.check()
        expanded = {**config.to_dict(), "resume": options.resume}
        del expanded["recipe"]  # it would replace options that are None
        print(to_toml(expanded), end="")
    else:
        from lineartime.training.loop import train_completed
        from lineartime.training.parallel import read_environment

        result = train_completed(config)
        if read_environment().rank == 0:
            if not result.finished:
                print(f"resume by: {_resume_command(result.run)}", file=SCREEN)
            print(f"best checkpoint: {result.checkpoint}")


def _resume_command(run: Path) -> str:
    from lineartime.models.systems import imported_names
    from lineartime.training.parallel import read_environment

    environment = read_environment()
    start = ["lineartime"]
    if environment.world_size > 1:
        start = ["torchrun", "--nproc-per-node", str(environment.local_world_size), "-m", "lineartime"]
    imports = [word for name in imported_names() for word in ("--import", name)]
    return shlex.join([*start, "train", "--resume", "--out", str(run), *imports])


def read_options(file: Path) -> dict[str, Any]:
    """The options in a TOML, YAML or JSON file. Raises LineartimeError, naming the file, if it is wrong or unreadable."""
    with reporting_file_errors("read", file):
        content = file.read_bytes()
    try:
        values = _parse(file, content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # from any of the parsers, or bytes that are not UTF-8
        what = " ".join(str(error).split())
        raise LineartimeError(f"{file} cannot be read as {file.suffix[1:].upper()}: {what}.") from None
    if not isinstance(values, dict):
        raise LineartimeError(f"{file} holds a {type(values).__name__}, but must hold options by name.")
    plain = {str(name).replace("-", "_"): value for name, value in values.items()}
    found = {_SHORT.get(name, name): value for name, value in plain.items()}
    if len(found) < len(values):
        raise LineartimeError(f"{file} has an option twice, under two names: keep one.")
    try:
        config = TrainConfig.from_dict(found)
    except ArgumentError as error:
        raise LineartimeError(f"{file}: {error}") from None
    return {name: getattr(config, name) for name in found}


def _parse(file: Path, text: str) -> Any:
    if file.suffix == ".json":
        return json.loads(text)
    if file.suffix == ".toml":
        try:
            return import_module("tomllib").loads(text)
        except ImportError:  # Python 3.10
            raise LineartimeError(f"{file} is TOML, which needs Python 3.11: use YAML or JSON.") from None
    if file.suffix not in (".yaml", ".yml"):
        raise LineartimeError(f"{file} has the suffix {file.suffix!r}: options are read from .toml, .yaml or .json.")
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        raise missing_extra("PyYAML", "data", f"{file}, a YAML file,") from None
    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # PyYAML alone reads 1e-3 as a string, not as a number
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-0123456789"))
    try:
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def to_toml(options: Mapping[str, Any]) -> str:
    """Format plain options as TOML, one per line. Those that are None, which TOML cannot express, are comments."""
    return "".join(
        f"# {name} =\n" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in options.items()
    )
