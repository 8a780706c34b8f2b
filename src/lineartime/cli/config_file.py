"""Options of a command in a file: the names are those of the options, and what is given on the command line wins.

preset = "flash-tiny"          # TOML; YAML and JSON look as usual
data = ["books/", "wiki.txt"]
learning-rate = 0.003          # or learning_rate
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError, did_you_mean, missing_extra, reporting
from lineartime.fields import shown
from lineartime.json_files import parse

_LARGEST = 2**20
"""Bytes of a file of options: more is another file, given by mistake."""
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


def read_options(file: Path, cls: type, aliases: Mapping[str, str]) -> dict[str, Any]:
    """The options in a TOML, YAML or JSON file, by the names of the fields of a dataclass.

    Args:
        file: its suffix tells its format.
        cls: the dataclass of the options.
        aliases: other names of fields.

    Raises:
        LineartimeError: naming the file, if it cannot be read, or has something that is no option. Types are not checked here.
    """
    with reporting("read", file):
        if file.stat().st_size > _LARGEST:
            raise LineartimeError(f"{file} is larger than a file of options can be ({_LARGEST:,} bytes).")
        text = file.read_bytes()
    try:
        values = _parse(file, text.decode())
    except (ValueError, RecursionError) as error:  # of all three parsers, and of bytes that are no UTF-8
        what = " ".join(str(error).split())
        raise LineartimeError(f"{file} cannot be read as {file.suffix[1:].upper()}: {what}.") from None
    if not isinstance(values, dict):
        raise LineartimeError(f"{file} holds a {type(values).__name__}, but must hold options by name.")
    known = [field.name for field in dataclasses.fields(cls)]
    found = {}
    for given, value in values.items():
        name = str(given).replace("-", "_")
        name = aliases.get(name, name)
        if name not in known:
            raise LineartimeError(f"{file} has {shown(given)}, which is no option{did_you_mean(name, known)}.")
        if name in found:
            raise LineartimeError(f"{file} has {name} twice, under two names: keep one.")
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


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
        loader: Any = type("Loader", (yaml.SafeLoader,), {})  # which also takes 1e-3 for a number, as everybody means it
        loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("+-0123456789"))
        try:
            return yaml.load(text, loader)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
    raise LineartimeError(f"{file} has the suffix {file.suffix!r}: options are read from .toml, .yaml or .json.")


def to_toml(options: Mapping[str, Any]) -> str:
    """Plain options as TOML, one a line; those without a value are left out, for TOML has no word for none."""
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items() if value is not None
    )
