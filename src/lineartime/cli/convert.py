"""`lineartime convert`: convert models to and from transformers, and from FLASH-pytorch and GAU-alpha."""

from dataclasses import dataclass
from pathlib import Path

from lineartime.cli.options import Checkpoint
from lineartime.errors import ArgumentError
from lineartime.files import is_folder, is_there
from lineartime.screen import Progress
from lineartime.units import number_or_text


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `lineartime convert`."""

    source: Path
    """Folder of a run, a checkpoint, a model of transformers or GAU-alpha; or a file of weights of FLASH-pytorch."""
    destination: Path
    """Folder to write."""
    checkpoint: Checkpoint = None
    flash_pytorch: tuple[str, ...] = ()
    """Arguments NAME=VALUE with which a model of FLASH-pytorch was built, if not its defaults: causal=true group_size=128."""
    tokenizer: str | None = None
    """Tokenizer of a model of FLASH-pytorch: bytes, hub:NAME, or the path of a tokenizer.json or of a run."""


def run(options: ConvertOptions) -> None:
    """Convert the model, and print what was written and how to load it."""
    from lineartime.foreign.conversion import is_foreign

    with Progress(f"converting {options.source}"):
        print((_read_foreign if is_foreign(options.source) else _convert)(options))


def _convert(options: ConvertOptions) -> str:
    """Convert a model of lineartime for transformers, or the reverse."""
    from lineartime.foreign.weights import SUFFIXES

    if not is_folder(options.source):
        problem = "whose suffix is not that of a file of weights" if is_there(options.source) else "which does not exist"
        advice = f"give the folder of a model, or a file of weights ({', '.join(SUFFIXES)})"
        raise ArgumentError("source", f"is {options.source}, {problem}: {advice}.")
    _refuse(options, "flash_pytorch", "tokenizer")
    from lineartime.hf.convert import CONFIG, convert  # needs transformers

    folder = convert(options.source, options.destination, checkpoint=options.checkpoint)
    if (folder / CONFIG).exists():
        return f"{folder}: a model of transformers, which its Auto classes load after `import lineartime.hf`"
    return _ours(folder)


def _read_foreign(options: ConvertOptions) -> str:
    """Convert a model of another package."""
    from lineartime.checkpoint import load_tokenizer
    from lineartime.foreign.conversion import convert

    _refuse(options, "checkpoint")
    words = {"true": True, "false": False}
    arguments = {}
    for item in options.flash_pytorch:
        name, equals, text = item.partition("=")
        if not equals:
            raise ArgumentError("flash_pytorch", f"contains {item!r}, which is not NAME=VALUE, for instance group_size=128.")
        arguments[name] = words[text.lower()] if text.lower() in words else number_or_text(text)
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    written = _ours(convert(options.source, options.destination, tokenizer=tokenizer, flash_pytorch=arguments))
    if is_folder(options.source) or "causal" in arguments:
        return written
    return (
        f"{written}\nIt is taken for a bidirectional model, the default of FLASH-pytorch: if it was built with causal=True, "
        "convert it again with --flash-pytorch causal=true."
    )


def _refuse(options: ConvertOptions, *names: str) -> None:
    """Raise ArgumentError for options that this conversion does not use."""
    for name in names:
        if getattr(options, name) != getattr(ConvertOptions, name):
            raise ArgumentError(name, f"is given, but converting {options.source} does not use it: leave it out.")


def _ours(folder: Path) -> str:
    from lineartime.checkpoint import read_model_config

    command = "fill" if read_model_config(folder).task == "mlm" else "generate"
    return f"{folder}: a model of lineartime, which `lineartime {command} {folder}` and the other commands read"
