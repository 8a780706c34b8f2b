"""The command line: arguments in, calls of the library, results out.

Each command is a module with a dataclass `Options`, whose fields are the command's options and whose docstrings are its help,
and a function `run`. Only this room knows that there is a command line: the library names arguments, which become flags here.
"""

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Union, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.text import Text

from lineartime.errors import ArgumentError, LineartimeError, ReportedError, cannot

_COMMANDS = ("train", "eval", "generate", "fill", "runs", "tokenize", "presets", "bench", "info")
"""The modules of this room. Each is imported only for its command, or for a list of all commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error that is shown, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options: Any = None
    try:
        if arguments == ["--version"]:
            import torch

            import lineartime

            print(f"lineartime {lineartime.__version__}, torch {torch.__version__}")
            return 0
        _check(arguments)
        options = parse(arguments)
        if arguments[0] == "train":
            _command("train").run(options, arguments[1:])
        else:
            _command(arguments[0]).run(options)
        sys.stdout.flush()  # so that an output nobody reads fails here
    except ReportedError:
        time.sleep(3)  # torchrun ends all processes when one ends: the one that reports the error must be first
        return 1
    except ArgumentError as error:
        return _fail(f"{_flag(error.argument, options)} {error.predicate}")
    except LineartimeError as error:
        return _fail(str(error))
    except BrokenPipeError:  # the reader of the output, for instance `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _fail(str(cannot("use", error.filename or "a file", error)))
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return _fail("This machine has too little memory: use a smaller --batch-size or --context-length.")
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: Sequence[str]) -> Any:
    """The `Options` of the command that the arguments name; exits with status 2 and a message if they are wrong."""
    if arguments and arguments[0] in _COMMANDS:
        options = _command(arguments[0]).Options
        return tyro.cli(options, prog=f"lineartime {arguments[0]}", args=arguments[1:])
    commands: Any = Union[tuple(Annotated[_command(name).Options, tyro.conf.subcommand(name)] for name in _COMMANDS)]  # noqa: UP007
    return tyro.cli(commands, prog="lineartime", description="Transformer quality in linear time.", args=arguments)


def _command(name: str) -> Any:
    return import_module(f"lineartime.cli.{name}")


def _check(arguments: Sequence[str]) -> None:
    """Raise LineartimeError for arguments that would be read as something else than was meant."""
    if arguments.count("--override") > 1:
        raise LineartimeError("--override is given twice: give all values after one, --override NAME=VALUE NAME=VALUE.")
    for option, value in pairwise(arguments):
        if value == "" and option in ("--out", "--data", "--tokenizer", "--cache"):
            raise LineartimeError(f"{option} is empty: give a path, or leave the option out.")


def _flag(argument: str, options: Any) -> str:
    """An argument of the library as the user wrote it: a flag, if the command has one of that name."""
    hints = get_type_hints(type(options), include_extras=True)
    if argument not in hints or tyro.conf.Positional in get_args(hints[argument]):
        return argument
    return "--" + argument.replace("_", "-")


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)


def _fail(message: str) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text("error: ", style="bold red") + Text(message))
    return 1
