"""Files of records, each with a document in one of its columns: JSON lines, JSON, CSV and Parquet.

Each reader is one function from a file to its texts. The modules csv and json need no extra. They also do what pyarrow, and
datasets with it, does not: another column may hold values of two types, the line of an error is that of the file, not of a
block, and CSV that ends within quotes is an error.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import IO, Any, Literal

from lineartime.data.local_files import CSV, LEAVE_OUT, SourceFile, damaged, missing_column, not_utf8, reporting
from lineartime.errors import LineartimeError, missing_extra

Format = Literal["text", "json lines", "json", "csv", "parquet"]

_PEEK = 1 << 16  # bytes that tell an array from JSON lines
_DELIMITERS = ",;\t|"
_LONGEST_FIELD = 1 << 30
"""The maximum length of a field of CSV, which may be a book; Python's default is 128 KiB."""


def file_format(file: SourceFile) -> Format:
    """The format of a file; all formats except "text" hold records.

    A .json file holds an array of objects or texts, JSON lines, or one object with the column. Any other JSON is text.

    Raises LineartimeError for a .json or .zip file that cannot be read, records in a .json file that lack the column, and
    Parquet in a compressed file.
    """
    if file.as_text:
        return "text"
    match file.format_suffix:
        case ".parquet":
            if file.is_compressed:
                raise LineartimeError(f"{file.path} is Parquet in a compressed file, which cannot be read: unpack it.")
            return "parquet"
        case ".jsonl" | ".ndjson":
            return "json lines"
        case ".csv" | ".tsv":
            return "csv"
        case ".json":
            return _json_format(file, file.version)
    return "text"


def why_no_records(file: SourceFile) -> LineartimeError | None:
    """The error for a .json or .csv file in which no record has the column; None for one with records or of plain JSON."""
    try:
        if file.format_suffix in CSV:
            with _csv_rows(file):
                return None
        if file.format_suffix == ".json":
            file_format(file)
    except LineartimeError as error:
        return error
    return None


def read_records(file: SourceFile) -> Iterator[str]:
    """Yield the texts of a file of records. Raises LineartimeError, naming file and place, on unreadable text."""
    match file_format(file):
        case "json lines":
            return _json_lines(file)
        case "json":
            return _json(file)
        case "csv":
            return _csv(file)
        case "parquet":
            return _parquet(file)
    raise ValueError(f"{file.path} has no records.")


def _json_lines(file: SourceFile) -> Iterator[str]:
    position, is_first = 0, True
    with file.open() as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file.path}, line {number},"
                yield _text(where, _loaded(where, line, position), file.column, is_first)
                is_first = False
            position += len(line)


def _json(file: SourceFile) -> Iterator[str]:
    whole = _whole(file)
    if isinstance(whole, dict):
        yield _text(str(file.path), whole, file.column, is_first=True)
    else:
        yield from (_record_text(file, record, number) for number, record in enumerate(whole, 1))


def _whole(file: SourceFile) -> Any:
    """The value of a JSON file, which is read into memory."""
    with file.open() as stream:
        return _loaded(str(file.path), stream.read(), 0)


@lru_cache(maxsize=4096)
def _json_format(file: SourceFile, version: tuple[int, int]) -> Format:
    """The format of a .json file of this version. Raises LineartimeError for one without texts that may be records."""
    path, column = file.path, file.column
    with file.open() as stream:
        first = stream.readline(_PEEK).removeprefix(codecs.BOM_UTF8)
        while first.isspace():
            first = stream.readline(_PEEK)
        if first.lstrip().startswith(b"["):
            for record in _whole(file)[:1]:
                _record_text(file, record, 1)
            return "json"
        if not first.endswith(b"\n"):
            first += stream.readline()
        row = _parsed(first)
        if isinstance(row, dict) and column in row:
            return "json lines"
        second = stream.readline(_PEEK)
        if isinstance(row, dict) and second.lstrip().startswith(b"{"):
            raise missing_column(column, f"{path}, line 1,", row)
        whole = _parsed(first + second + stream.read())
    if not isinstance(whole, dict):
        return "text"
    if isinstance(whole.get(column), str):
        return "json"
    lists = [name for name, value in whole.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists:
        found = f'{path} is a JSON object with its records in "{lists[0]}"'
        raise LineartimeError(f"{found}: write that list alone, or one record in each line.")
    return "text"


def _parsed(content: bytes) -> Any:
    """The value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _record_text(file: SourceFile, record: Any, number: int) -> str:
    """The text of a record of an array: an object with the column, or the text itself."""
    whole = {file.column: record} if isinstance(record, str) else record
    return _text(f"{file.path}, record {number},", whole, file.column, is_first=number == 1)


def _loaded(where: str, content: bytes, position: int) -> Any:
    if position == 0 and content.startswith(codecs.BOM_UTF8):
        position, content = len(codecs.BOM_UTF8), content.removeprefix(codecs.BOM_UTF8)
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(where, content, error.start, position + error.start) from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise LineartimeError(f"{where} is not JSON ({reason.removesuffix(' at')}): correct it, or leave it out.") from None


def _text(where: str, record: Any, column: str, is_first: bool) -> str:
    """The text of a record; empty for null."""
    wrong = ""
    if not isinstance(record, dict):
        wrong = f'is {record!r:.40}, but must be an object with a "{column}"'
    elif column not in record:
        if is_first:
            raise missing_column(column, where, record)
        wrong = f'has no "{column}"'  # but the records before it have: another column would not help
    else:
        text = _value(where, column, record[column])
        try:
            text.encode()
            return text
        except UnicodeEncodeError as error:
            wrong = f"has an incomplete character in its text ({error.reason})"
    raise LineartimeError(f"{where} {wrong}: correct it, or leave it out.")


def _value(where: str, column: str, value: object) -> str:
    """The text in a column of a record; empty for null."""
    if value is None or isinstance(value, str):
        return value or ""
    raise LineartimeError(f'{where} has {value!r:.40} in "{column}" instead of a text: correct it, or leave it out.')


def _csv(file: SourceFile) -> Iterator[str]:
    with _csv_rows(file) as (rows, columns):
        place = columns.index(file.column)
        for row in rows:
            if row and len(row) != len(columns):  # an empty line is no record
                fields = "1 field" if len(row) == 1 else f"{len(row)} fields"
                found = f"{file.path}, line {rows.line_num:,}, has {fields}, but line 1 names {len(columns)}"
                raise LineartimeError(f"{found}: quote fields that have separators in them, or ", *LEAVE_OUT)
            if row:
                yield row[place]


@contextmanager
def _csv_rows(file: SourceFile) -> Iterator[tuple[Any, list[str]]]:
    """The rows after the first one, and the columns that it names, with that of the text."""
    csv.field_size_limit(max(_LONGEST_FIELD, csv.field_size_limit()))  # of the whole process: there is no other
    with file.open() as stream:
        lines = _lines(file, stream)
        header = next(lines, "").removeprefix("\ufeff")
        if file.format_suffix == ".tsv":  # by its standard, without quotes
            rows = csv.reader(chain([header], lines), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
        else:  # the most frequent separator of the first line, outside of quotes
            delimiter = max(_DELIMITERS, key=re.sub(r'"[^"]*"', "", header).count)
            rows = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
        try:
            columns = [name.strip() for name in next(rows, [])]
            if file.column not in columns:
                raise missing_column(file.column, f"{file.path}, line 1,", columns)
            yield rows, columns
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


def _parquet(file: SourceFile) -> Iterator[str]:
    path, column = file.path, file.column
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "data", f"Reading {path}") from None
    number = 0
    try:
        with reporting(path), path.open("rb") as raw, parquet.ParquetFile(raw) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise missing_column(column, str(path), names)
            for batch in table.iter_batches(batch_size=16, columns=[column]):  # few rows at a time: a row may be a whole book
                for value in batch.column(0):
                    yield _value(f"{path}, row {number},", column, value.as_py())
                    number += 1
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise LineartimeError(f"{path}, row {number}, is not UTF-8 text ({byte}): write it anew, or leave it out.") from None
    except arrow.ArrowException as error:
        raise damaged(path, error) from None
