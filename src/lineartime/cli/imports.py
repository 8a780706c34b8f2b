"""The option --import, which every command takes: modules that register systems."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from lineartime.errors import LineartimeError


def split_imports(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The modules that --import names, anywhere, and the other arguments."""
    modules, rest = [], []
    values = iter(arguments)
    for argument in values:
        flag, is_one, value = argument.partition("=")
        if flag != "--import":
            rest.append(argument)
            continue
        value = value if is_one else next(values, "")
        if not value or value.startswith("-"):
            raise LineartimeError("--import needs a value: give a module, or a file ending in .py, that registers systems.")
        if "/" in value and not value.endswith(".py"):
            raise LineartimeError(f"--import is {value}, but must be a file ending in .py, or a module that Python finds.")
        modules.append(str(Path(value).absolute()) if value.endswith(".py") else value)
    return modules, rest


def import_options() -> str:
    """The options that import what this process has imported, to append to a command."""
    from lineartime.models.registering import imported_names

    return "".join(f" --import {shlex.quote(name)}" for name in imported_names())
