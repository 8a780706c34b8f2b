"""The command line: parse the arguments, call the library, and print the results.

Each command is a module with a dataclass `Options`, whose fields are the command's options and whose docstrings are its help,
and a function `run`. Only this package knows about flags: errors of the library name arguments, which become flags here.
"""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console
from rich.text import Text

from lineartime.cli.imports import split_imports
from lineartime.errors import Argument, Call, LineartimeError, ReportedError, did_you_mean, file_error, spelled
from lineartime.host import installed_version
from lineartime.screen import SCREEN, discard, open_standard_streams

INTERRUPTED = 130
_NARROWEST = 20
"""The minimum terminal width in columns: at smaller widths, tyro's help formatter does not terminate."""
_COMMANDS = (
    "train",
    "eval",
    "generate",
    "fill",
    "inspect",
    "convert",
    "export",
    "runs",
    "tokenize",
    "presets",
    "bench",
    "reproduce",
    "info",
)
"""The modules of this package. Each is imported only for its own command, or to list all commands.

They import slow packages (PyTorch, matplotlib) inside `run`, so that help appears at once.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a reported error, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options: Any = None
    open_standard_streams()
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)
    try:
        modules, arguments = split_imports(arguments)
        if arguments[:1] == ["--version"]:
            print(f"lineartime {installed_version('lineartime')}, torch {installed_version('torch')}")
            return 0
        _import(modules)
        _check(arguments)
        options = parse(arguments)
        with spelled(partial(_written, options=options, arguments=arguments)):
            if arguments[0] in ("train", "reproduce"):
                _command(arguments[0]).run(options, arguments[1:])
            else:
                _command(arguments[0]).run(options)
        sys.stdout.flush()  # so that a closed output fails here
    except ReportedError:
        time.sleep(3)  # torchrun ends all processes when one ends: let the one that reports the error end first
        return 1
    except LineartimeError as error:
        return _fail(error.message(partial(_written, options=options, arguments=arguments)))
    except BrokenPipeError:  # the reader of the output, for instance `head`, has closed it
        discard(sys.stdout)
    except OSError as error:
        if error.filename is not None:
            return _fail(str(file_error("use", error.filename, error)))
        discard(sys.stdout)  # most likely, this is what failed
        return _fail(str(file_error("write", "the output or a file", error)))
    except (RuntimeError, MemoryError) as error:
        from lineartime.machine import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        return _fail(_too_little_memory(options))
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "stopped", file=SCREEN)
        return INTERRUPTED
    return 0


def _import(modules: Sequence[str]) -> None:
    if modules:
        from lineartime.models.registering import import_everywhere

        import_everywhere(modules)


def parse(arguments: Sequence[str]) -> Any:
    """Parse the arguments into the `Options` of their command; exit with status 2 and a message if they are wrong."""
    if arguments and arguments[0] in _COMMANDS:
        options = _command(arguments[0]).Options
        if problem := _misplaced(arguments) or _looks_like_option(arguments) or _wrong_choice(arguments):
            _fail(problem)
            sys.exit(2)
        return tyro.cli(options, prog=f"lineartime {arguments[0]}", args=arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        _fail(f"{arguments[0]} is not a command{did_you_mean(arguments[0], _COMMANDS)}: use one of {', '.join(_COMMANDS)}.")
        sys.exit(2)
    # Not A | B: the members are known only when this runs.
    commands: Any = Union[tuple(Annotated[_command(name).Options, tyro.conf.subcommand(name)] for name in _COMMANDS)]  # noqa: UP007  # X | Y takes no tuple
    version = tyro.conf.arg(help="Print the versions of lineartime and PyTorch, and exit.")  # `main` does it
    imported = tyro.conf.arg(
        name="import",
        metavar="MODULE",
        help="A module, or a file ending in .py, that registers systems of your own; it may come anywhere, and be repeated.",
    )
    fields: list[Any] = [
        ("command", Annotated[commands, tyro.conf.arg(name="")]),
        ("version", Annotated[bool, tyro.conf.FlagCreatePairsOff, version], False),
        ("import_", Annotated[str | None, imported], None),
    ]
    everything = make_dataclass("everything", fields)
    return tyro.cli(everything, prog="lineartime", description="Transformer quality in linear time.", args=arguments)


def _command(name: str) -> Any:
    return import_module(f"lineartime.cli.{name}")


def _check(arguments: Sequence[str]) -> None:
    """Raise LineartimeError for arguments that tyro would accept but misread."""
    given, (lists, repeatable) = _flags(arguments), _lists(arguments)
    for flag in dict.fromkeys(given):
        if given.count(flag) > 1 and flag in lists:
            raise LineartimeError(f"{flag} is given twice, and only the last one would count: give all its values after one.")
        if given.count(flag) > 1 and flag not in repeatable:  # as scripts do to replace a value
            print(f"{flag} is given twice: the last one counts.", file=SCREEN)
    for flag, value in pairwise((*arguments, "--")):
        if flag.replace("_", "-") in lists - _may_be_empty(arguments) and value.startswith("--"):
            raise LineartimeError(f"{flag} has no value: give at least one, or leave the option out.")
    for option in ("--out", "--cache"):  # an empty path would be the working directory
        if (option, "") in pairwise(arguments) or f"{option}=" in arguments:
            raise LineartimeError(f"{option} is empty: give a path, or leave the option out.")


def _misplaced(arguments: Sequence[str]) -> str:
    """A sentence for a text or a run that `train` or `tokenize` is given without its option; empty if there is none."""
    command, first = arguments[0], (*arguments[1:], "-")[0]
    if command in ("train", "tokenize") and not first.startswith("-"):
        return f"{first} is given without an option: write --data {first} for a text."
    after = next((value for flag, value in pairwise(arguments) if flag == "--resume" and not value.startswith("-")), None)
    return "" if after is None else f"--resume takes no value, but is followed by {after}: write --resume --out {after}."


def _looks_like_option(arguments: Sequence[str]) -> str:
    """A sentence for a text that begins like an option, which the parser would take for one; empty if there is none."""
    hints = get_type_hints(_command(arguments[0]).Options)
    texts = [f"--{name.replace('_', '-')}" for name, hint in hints.items() if str in (hint, *get_args(hint))]
    for flag, value in pairwise(arguments):
        if (
            flag.replace("_", "-") in texts
            and value.startswith("-")
            and not value.startswith("--")
            and value not in ("-", "-h")
        ):
            return f"{flag} is followed by {value}, which looks like an option: write {flag}={shlex.quote(value)}."
    return ""


def _wrong_choice(arguments: Sequence[str]) -> str:
    """A sentence for a value that is none of the choices of its option; empty if there is none.

    The parser would list the choices in another order each time.
    """
    given = _values(arguments)
    for name, hint in get_type_hints(_command(arguments[0]).Options).items():
        kinds = [kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal]
        flag = f"--{name.replace('_', '-')}"
        if not kinds or flag not in given:
            continue
        choices = [str(choice) for choice in get_args(kinds[0])]
        several = get_origin(hint) is tuple
        verb = "contains" if several else "is"
        for value in given[flag] if several else given[flag][:1]:
            if value not in choices and (value != "None" or several or hint is kinds[0]):
                return f"{flag} {verb} {value}{did_you_mean(value, choices)}, but must be one of {', '.join(choices)}."
    return ""


def _values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values after each flag; of a flag that is repeated, those after the last one."""
    values: dict[str, list[str]] = {}
    flag = ""
    for argument in arguments:
        if argument.startswith("--"):
            flag, is_one, value = argument.partition("=")
            flag = flag.replace("_", "-")
            values[flag] = [value] if is_one else []
        elif flag:
            values[flag].append(argument)
    return values


def _flags(arguments: Sequence[str]) -> list[str]:
    """The flags among the arguments, as their help spells them."""
    return [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]


def _lists(arguments: Sequence[str]) -> tuple[set[str], set[str]]:
    """The flags of a command that take several values at once, and those that may be repeated instead."""
    lists: set[str] = set()
    repeatable: set[str] = set()
    if not arguments or arguments[0] not in _COMMANDS:
        return lists, repeatable
    hints = get_type_hints(_command(arguments[0]).Options, include_extras=True)
    for name, hint in hints.items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if get_origin(kind) is tuple:
            (repeatable if tyro.conf.UseAppendAction in marks else lists).add(f"--{name.replace('_', '-')}")
    return lists, repeatable


def _may_be_empty(arguments: Sequence[str]) -> set[str]:
    """The flags of a command whose default is not empty, so that no value means something else."""
    if not arguments or arguments[0] not in _COMMANDS:
        return set()
    return {f"--{field.name.replace('_', '-')}" for field in fields(_command(arguments[0]).Options) if field.default != ()}


def _written(part: Argument | Call, options: Any, arguments: Sequence[str]) -> str:
    """The command-line spelling of an argument or a call that an error names.

    Advice may name an option of `train`. An argument that neither command has keeps its name in Python.
    """
    if isinstance(part, Call):
        return f"`lineartime {part.name}`"
    if part == Argument("import"):
        return "--import"
    if getattr(options, f"{part.name}_file", None) is not None:  # a text that an option takes from a file
        part = Argument(f"{part.name}_file", part.value)
    hints = get_type_hints(type(options), include_extras=True)
    if part.name not in hints and part.value is not None:
        hints = get_type_hints(_command("train").Options, include_extras=True)
    if part.name not in hints:
        return str(part)
    if tyro.conf.Positional in get_args(hints[part.name]):
        return part.name
    name = part.name.replace("_", "-")
    if isinstance(part.value, bool):
        return f"--{name}" if part.value else f"--no-{name}"
    flag = _flag(f"--{name}", get_args(hints[part.name]), arguments)
    return flag if part.value is None else f"{flag} {shlex.quote(str(part.value))}"


def _flag(flag: str, annotations: Sequence[Any], arguments: Sequence[str]) -> str:
    """The spelling of an option that the user chose: its `flag`, or one of the aliases in its annotations."""
    aliases = [alias for each in annotations for alias in getattr(each, "aliases", None) or ()]
    given = _flags(arguments)
    return next((alias for alias in aliases if alias in given), flag)


def _too_little_memory(options: Any) -> str:
    """What to say when memory runs out: the options of the command that need less."""
    sizes = [f"--{name.replace('_', '-')}" for name in ("batch_size", "context_length", "samples") if hasattr(options, name)]
    return "This machine has too little memory" + (f": use a smaller {' or '.join(sizes)}." if sizes else ".")


def _fail(message: str) -> int:
    Console(file=SCREEN, highlight=False, soft_wrap=True).print(Text("error: ", style="bold red") + Text(message))
    return 1
