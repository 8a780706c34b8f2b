"""`python -m lineartime.experiments NAME`: as `lineartime reproduce`, where the packages of the command line are missing."""

import argparse
import ast
import inspect
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lineartime.errors import LineartimeError
from lineartime.experiments.config import ReproduceConfig
from lineartime.host import let_threads_sleep
from lineartime.screen import SCREEN, discard


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the options, which are the fields of `ReproduceConfig`, and return the exit status."""
    let_threads_sleep()
    parser = argparse.ArgumentParser(prog="python -m lineartime.experiments", description=ReproduceConfig.__doc__)
    hints = get_type_hints(ReproduceConfig)
    described = _field_docstrings(ReproduceConfig)
    for field in fields(ReproduceConfig):
        assert field.default is not MISSING
        _add(parser, field.name, hints[field.name], field.default, described[field.name])
    _add(parser, "import", tuple[str, ...], (), "Modules, or files ending in .py, that register systems.")
    options = vars(parser.parse_args(arguments))
    modules = [str(Path(name).absolute()) if name.endswith(".py") else name for name in options.pop("import")]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    try:
        from lineartime.experiments.command import FAILED, reproduce
        from lineartime.models.registering import import_everywhere

        if modules:
            import_everywhere(modules)
        result = reproduce(ReproduceConfig(**options))
        sys.stdout.flush()  # so that an output nobody reads fails here
    except LineartimeError as error:
        print(f"error: {error}", file=SCREEN)
        return 1
    except BrokenPipeError:  # the reader of the output, for instance `head`, has closed it
        discard(sys.stdout)
        return 0
    except KeyboardInterrupt:
        return 130
    if result.interrupted:
        print("interrupted: run the same command again to resume", file=SCREEN)
        return 130
    if result.problems:
        print(f"error: {FAILED}", file=SCREEN)
        return 1
    return 0


def _field_docstrings(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, which Python itself does not keep."""
    [definition] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: str(text.value.value).replace("%", "%%")
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _add(parser: argparse.ArgumentParser, name: str, hint: Any, default: Any, description: str) -> None:
    """Add a field of the options: its type tells what it takes."""
    if name == "name":
        parser.add_argument(name, nargs="?", default=default, help=description)
        return
    flag = f"--{name.replace('_', '-')}"
    if hint is bool:
        parser.add_argument(flag, action="store_true", help=description)
        return
    if get_origin(hint) in (Union, UnionType):
        [hint] = [option for option in get_args(hint) if option is not NoneType]
    several = get_origin(hint) is tuple
    kind = get_args(hint)[0] if several else hint
    choices = get_args(kind) if get_origin(kind) is Literal else None
    make = kind if kind in (int, float) else str  # paths, too: `ReproduceConfig` refuses empty ones
    parser.add_argument(flag, nargs="+" if several else None, type=make, choices=choices, default=default, help=description)


if __name__ == "__main__":
    sys.exit(main())
