"""Texts that an option gives directly or in a file."""

import sys
from pathlib import Path

from lineartime.errors import Argument, ArgumentError, reporting_file_errors


def read_text(option: str, text: str, file_option: str, file: Path | None) -> str:
    """The text of one of two options: given directly, or read without a byte order mark from a file (-: standard input).

    Raises:
        ArgumentError: if both are given, or the file is not UTF-8 text.
        LineartimeError: if the file cannot be read.
    """
    if file is None:
        return text
    if text:
        raise ArgumentError(file_option, "cannot be combined with ", Argument(option), ": use one or the other.")
    try:
        if file == Path("-"):
            return sys.stdin.buffer.read().decode("utf-8-sig")
        with reporting_file_errors("read", file):
            return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ArgumentError(file_option, f"is {file}, which is not UTF-8 text: convert it to UTF-8.") from None
