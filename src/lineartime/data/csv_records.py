"""CSV and TSV files of records, whose first line names the columns."""

import csv
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import IO, Any

from lineartime.data.local_files import LEAVE_OUT, SourceFile, missing_column, not_utf8
from lineartime.errors import LineartimeError

_DELIMITERS = ",;\t|"
_LONGEST = 1 << 30
"""The maximum length of a field, which may be a book; Python's default is 128 KiB."""


def csv_records(file: SourceFile) -> Iterator[str]:
    """Yield the texts of a file. Raises LineartimeError, naming file and line, if it cannot be read or lacks the column."""
    with _reader(file) as (rows, columns):
        if file.column not in columns:
            raise missing_column(file.column, f"{file.path}, line 1,", columns)
        place = columns.index(file.column)
        for row in rows:
            if row and len(row) != len(columns):  # an empty line is no record
                fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                found = f"{file.path}, line {rows.line_num:,}, has {fields}, but line 1 names {len(columns)}"
                raise LineartimeError(f"{found}: quote fields that have separators in them, or ", *LEAVE_OUT)
            if row:
                yield row[place]


@lru_cache(maxsize=4096)
def csv_without_column(file: SourceFile, version: tuple[int, int]) -> LineartimeError | None:
    """The error for a file without the column; None for one that has it. `version` tells files from changed ones."""
    try:
        with _reader(file) as (_, columns):
            return None if file.column in columns else missing_column(file.column, f"{file.path}, line 1,", columns)
    except LineartimeError as error:
        return error


@contextmanager
def _reader(file: SourceFile) -> Iterator[tuple[Any, list[str]]]:
    """The rows after the first one, which names the columns. Raises LineartimeError for what is not CSV or not UTF-8."""
    csv.field_size_limit(max(_LONGEST, csv.field_size_limit()))  # of the whole process: there is no other
    with file.open() as stream:
        lines = _lines(file, stream)
        header = next(lines, "").removeprefix("\ufeff")
        if file.format_suffix == ".tsv":  # by its standard, without quotes
            rows = csv.reader(chain([header], lines), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
        else:
            rows = csv.reader(chain([header], lines), delimiter=_delimiter(header), strict=True)
        try:
            yield rows, [name.strip() for name in next(rows, [])]
        except csv.Error as error:
            where = f"{file.path}, line {rows.line_num:,},"
            raise LineartimeError(f"{where} is not CSV ({error}): correct it, or leave it out.") from None


def _lines(file: SourceFile, stream: IO[bytes]) -> Iterator[str]:
    position = 0
    for number, line in enumerate(stream, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            where = f"{file.path}, line {number:,},"
            raise not_utf8(where, line, error.start, position + error.start) from None
        position += len(line)


def _delimiter(header: str) -> str:
    """The most frequent separator of the first line, outside of quotes."""
    return max(_DELIMITERS, key=re.sub(r'"[^"]*"', "", header).count)
