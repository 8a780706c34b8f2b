"""Read options of training from a file, by their names; the command line takes precedence.

preset = "flash-tiny"          # TOML; YAML and JSON work as well
data = ["books/", "wiki.txt"]
learning-rate = 0.003          # or learning_rate
"""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from lineartime.errors import ArgumentError, LineartimeError, did_you_mean, missing_extra, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import parse
from lineartime.training.config import TrainConfig

_ALIASES = {"model": "preset", "context": "context_length"}
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


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
    known = [field.name for field in fields(TrainConfig)]
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = str(given).replace("-", "_")
        name = _ALIASES.get(name, name)
        if name not in known:
            raise LineartimeError(f"{file} has the unknown option {shown(given)}{did_you_mean(name, known)}.")
        if name in found:
            raise LineartimeError(f"{file} has {name} twice, under two names: keep one.")
        found[name] = value
    try:
        return {name: getattr(TrainConfig(**found), name) for name in found}
    except ArgumentError as error:
        raise LineartimeError(f"{file}: {error}") from None


def _parse(file: Path, text: str) -> Any:
    if file.suffix == ".json":
        return parse(text.encode())
    if file.suffix == ".toml":
        try:
            tomllib: Any = import_module("tomllib")
        except ImportError:  # Python 3.10
            raise LineartimeError(f"{file} is TOML, which needs Python 3.11: use YAML or JSON.") from None
        return tomllib.loads(text)
    if file.suffix in (".yaml", ".yml"):
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
    raise LineartimeError(f"{file} has the suffix {file.suffix!r}: options are read from .toml, .yaml or .json.")


def to_toml(options: Mapping[str, Any]) -> str:
    """Format plain options as TOML, one per line. Those that are None, which TOML cannot express, are comments."""
    return "".join(
        f"# {name} =\n" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in options.items()
    )
