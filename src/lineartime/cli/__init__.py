"""The command line: tyro parses the arguments, a command calls the library and prints the results.

Each command is a module with a dataclass, where there is one that of the library, whose fields are the command's options with
their docstrings as help, and a function `run`. Only this package knows about flags: errors of the library name arguments, which
become flags here.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import tyro
from rich.console import Console
from rich.text import Text

from lineartime.errors import ArgumentError, LineartimeError, file_error
from lineartime.host import installed_version
from lineartime.screen import SCREEN, discard, open_standard_streams

INTERRUPTED = 130
COMMANDS = {
    "train": "Train a model on text; writes checkpoints, metrics.jsonl, TensorBoard scalars and a loss curve to --out.",
    "eval": (
        "Measure trained models on a whole split: nats, bits per byte, perplexity per token and word, and loss by position."
    ),
    "generate": (
        "Continue a prompt with a trained causal model; text appears as it is produced. A long text can be read once for many."
    ),
    "fill": "Show what a trained masked model predicts at each [MASK] of a text.",
    "finetune": "Fine-tune a masked language model; --out gets the best model, its predictions and the metrics of all rates.",
    "predict": "Answer questions or label texts with a model that finetune trained.",
    "inspect": "Look inside a trained model as it reads a text: attention maps, local and global parts, states, and losses.",
    "convert": "Convert a trained model for another library, or a model of another library for lineartime.",
    "export": "Export a trained model as a program that PyTorch or onnxruntime runs without its Python code.",
    "runs": "Compare runs on the same text: a table with the best run first, and a plot of losses by step, tokens and time.",
    "tokenize": "Train a tokenizer on the training split of a text; `lineartime train --tokenizer` takes the file.",
    "presets": "List the models that can be built by name, and what they cost.",
    "bench": "Measure what models cost: time, tokens/s and memory; writes JSON, a table and plots to --out.",
    "reproduce": (
        "Train the models that an experiment of the paper compares, one process per run, and show results beside the paper's."
    ),
    "info": "Show what would run on this machine, and why: device, precision, compilation, backends, optional packages.",
}
"""The modules of this package, and what their commands do. Each is imported only for its own command.

They import slow packages (PyTorch, matplotlib) inside `run`, so that help appears at once.
"""
POSITIONAL = dict.fromkeys(("folders", "name", "names", "presets", "run", "runs")) | {
    name: name.upper() for name in ("destination", "file", "source")
}
"""The options that are given without a flag, and how the help calls them if not by their type."""
_IMPORT = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(name="import", metavar="MODULE", help="Module, or file ending in .py, that registers systems of your own."),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for a reported error, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    kind, options = type(None), None
    open_standard_streams()
    try:
        if arguments[:1] == ["--version"]:
            print(f"lineartime {installed_version('lineartime')}, torch {installed_version('torch')}")
            return 0
        for _ in range(arguments.count("--import")):  # which may stand before the command, too
            if arguments[:1] == ["--import"]:
                arguments = [*arguments[2:], *arguments[:2]]
        if not arguments or arguments[0] not in COMMANDS:
            _show_commands(arguments)
        name, *rest = arguments
        kind = options_of(name)
        options = parse(name, rest)
        run = import_module(f"lineartime.cli.{name}").run
        if name in ("train", "reproduce"):
            run(options, rest)
        else:
            run(options)
        sys.stdout.flush()  # so that a closed output fails here
    except LineartimeError as error:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # if the main process reports the same, torchrun ends this one meanwhile
        return _fail(_sentence(error, kind, options))
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
        known = _flags(kind)
        flags = [known[name] for name in ("batch_size", "context_length", "samples") if name in known]
        advice = f": use a smaller {' or '.join(flags)}." if flags else "."
        return _fail(f"This machine has too little memory{advice}")
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "stopped", file=SCREEN)
        return INTERRUPTED
    return 0


def options_of(command: str) -> Any:
    """The dataclass of a command's options."""
    return getattr(import_module(f"lineartime.cli.{command}"), f"{command.capitalize()}Options")


def parse(command: str, arguments: Sequence[str]) -> Any:
    """Parse the options of a command, and import the modules that --import names.

    Exit with status 2 and a message if the arguments are wrong.

    Raises:
        ArgumentError: for a value that the dataclass does not allow.
        LineartimeError: for a list that is given twice, of which tyro would keep the last values alone, and for an empty path,
            as of a variable that is not set, which would be the current folder; or if a module cannot be imported.
    """
    options = options_of(command)
    flags = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
    for name, hint in get_type_hints(options, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        flag = f"--{name.replace('_', '-')}"
        if get_origin(kind) is tuple and tyro.conf.UseAppendAction not in marks and flags.count(flag) > 1:
            raise LineartimeError(f"{flag} is given twice, and only the last one would count: give all its values after one.")
    own: Any = ("options", Annotated[_unchecked(options), tyro.conf.arg(name="")])
    with_import: Any = make_dataclass("with_import", [own, ("modules", _IMPORT, ())])
    parsed = tyro.cli(with_import, prog=f"lineartime {command}", description=COMMANDS[command], args=arguments)
    values = vars(parsed.options)
    empty = [name for name, value in values.items() if value == Path() or value == (Path(),)]
    if empty and any(word == "" or word.endswith("=") for word in arguments):
        raise LineartimeError(f"--{empty[0].replace('_', '-')} is an empty path: give one, or leave it out.")
    if parsed.modules:
        from lineartime.models.systems import import_modules

        import_modules([str(Path(name).absolute()) if name.endswith(".py") else name for name in parsed.modules])
    return options(**values)


def _unchecked(options: type[Any]) -> Any:
    """The dataclass with marks for tyro, and without its checks, whose errors tyro would show as those of the parser."""
    hints, marked = get_type_hints(options, include_extras=True), list[Any]()
    for each in fields(options):
        hint = hints[each.name]
        if each.name in POSITIONAL:
            hint = Annotated[hint, tyro.conf.Positional, tyro.conf.arg(metavar=POSITIONAL[each.name])]
        elif is_dataclass(hint):  # more options of the same command
            hint = Annotated[hint, tyro.conf.OmitArgPrefixes]
        else:
            continue
        marked.append((each.name, hint, field(default=each.default, default_factory=each.default_factory)))
    without_checks = {"__post_init__": lambda self: None}
    return make_dataclass("unchecked", marked, bases=(options,), namespace=without_checks, frozen=True)


def _show_commands(arguments: Sequence[str]) -> None:
    """Exit with the list of commands, for --help or for what is no command."""
    kinds = [make_dataclass(name, [], namespace={"__doc__": does}) for name, does in COMMANDS.items()]
    # Not A | B: the members are known only when this runs.
    commands: Any = Union[tuple(Annotated[kind, tyro.conf.subcommand(kind.__name__)] for kind in kinds)]  # noqa: UP007  # X | Y takes no tuple
    version = tyro.conf.arg(help="Print the versions of lineartime and PyTorch, and exit.")  # `main` does it
    fields: list[Any] = [
        ("command", Annotated[commands, tyro.conf.arg(name="")]),
        ("version", Annotated[bool, tyro.conf.FlagCreatePairsOff, version], False),
    ]
    everything: Any = make_dataclass("everything", fields)
    tyro.cli(everything, prog="lineartime", description="Transformer quality in linear time.", args=arguments[:1])


def _sentence(error: LineartimeError, kind: type, options: Any) -> str:
    """The message of an error, in which an option of this command takes the place of the argument of Python that is wrong."""
    if not isinstance(error, ArgumentError):
        return error.message
    name = error.argument.partition("[")[0]  # "context_lengths[1]" is a value of --context-lengths
    if getattr(options, f"{name}_file", None) is not None:  # a text that was read from a file
        name += "_file"
    return f"{_flags(kind).get(name, error.argument)} {error.predicate}"


def _flags(options: type) -> dict[str, str]:
    """How each argument is given on the command line: by its flag, or, if it has none, by its name."""
    flags = {}
    for name, hint in get_type_hints(options).items():
        flags[name] = name if name in POSITIONAL else f"--{name.replace('_', '-')}"
        flags |= _flags(hint) if isinstance(hint, type) and is_dataclass(hint) else {}
    return flags


def _fail(message: str) -> int:
    Console(file=SCREEN, highlight=False, soft_wrap=True).print(Text("error: ", style="bold red") + Text(message))
    return 1
