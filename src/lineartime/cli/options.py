"""Options that several commands have, and texts that are given directly or in a file."""

import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from lineartime import choices
from lineartime.checkpoint import CheckpointChoice
from lineartime.errors import ArgumentError, reporting_file_errors

Run = Annotated[Path, tyro.conf.arg(help="Folder of a run, or of one checkpoint.")]
Json = Annotated[bool, tyro.conf.arg(help="Print the result as one line of JSON.")]
Checkpoint = Annotated[
    CheckpointChoice | None,
    tyro.conf.arg(
        metavar="best|last|STEP",
        help="Checkpoint of the run: best, last, or a step number; the default is the best by validation loss.",
    ),
]
Device = Annotated[choices.Device, tyro.conf.arg(help="Device to compute on; auto takes a GPU if there is one.")]
Threads = Annotated[
    int | None,
    tyro.conf.arg(help="Number of CPU threads; the default is PyTorch's. While other programs run, 1 is often fastest."),
]


def read_text(options: Any, name: str) -> str:
    """The text of an option, or that of its file (-: standard input), without a byte order mark.

    Raises:
        ArgumentError: if both are given, or the file is not UTF-8 text.
        LineartimeError: if the file cannot be read.
    """
    text: str = getattr(options, name)
    file: Path | None = getattr(options, f"{name}_file")
    if file is None:
        return text
    if text:
        raise ArgumentError(f"{name}_file", f"cannot be combined with `{name}`: use one or the other.")
    try:
        with reporting_file_errors("read", file):
            content = sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ArgumentError(f"{name}_file", f"is {file}, which is not UTF-8 text: convert it to UTF-8.") from None
