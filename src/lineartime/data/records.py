"""Files of records, each with a document in one of its columns: JSON lines, JSON, CSV and Parquet."""

import codecs
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

from lineartime.data.csv_records import csv_records, csv_without_column
from lineartime.data.local_files import COMPRESSED, CSV, RECORDS, Expansion, SourceFile, damaged, missing_column, not_utf8
from lineartime.errors import LineartimeError, file_error, missing_extra

Format = Literal["text", "json lines", "json", "csv", "parquet"]

_PEEK = 1 << 16  # bytes that tell an array from JSON lines


def file_format(file: SourceFile) -> Format:
    """The format of a file; all formats except "text" hold records.

    A .json file holds an array of objects or texts, JSON lines, or one object with the column. Any other JSON is text.

    Raises:
        LineartimeError: for a .json or .zip file that cannot be read, records that lack the column, a tar archive, and Parquet
            in a compressed file.
    """
    if file.as_text:
        return "text"
    match file.format_suffix:
        case ".parquet":
            if file.path.suffix.lower() in COMPRESSED:
                raise LineartimeError(f"{file.path} is Parquet in a compressed file, which cannot be read: unpack it.")
            return "parquet"
        case ".jsonl" | ".ndjson":
            return "json lines"
        case ".csv" | ".tsv":
            return "csv"
        case ".json":
            found = _json_format(file, file.version)
            if isinstance(found, LineartimeError):
                raise found.with_traceback(None)
            return found
    return "text"


def is_named_text(file: SourceFile) -> bool:
    """Whether a file is plain, uncompressed text by its name; CSV is."""
    suffix = file.path.suffix.lower()
    return suffix in CSV or suffix not in (*COMPRESSED, *RECORDS)


def why_no_records(file: SourceFile) -> LineartimeError | None:
    """The error for a .json or .csv file in which no record has the column; None for one with records or of plain JSON."""
    if file.format_suffix in CSV:
        return csv_without_column(file, file.version)
    if file.format_suffix != ".json":
        return None
    found = _json_format(file, file.version)
    return found if isinstance(found, LineartimeError) else None


@lru_cache(maxsize=4096)
def _json_format(file: SourceFile, version: tuple[int, int]) -> Format | LineartimeError:
    """The format of a .json file, or the error for one without texts that may be records."""
    path, column = file.path, file.column
    with file.open() as stream:
        first = stream.readline(_PEEK).removeprefix(codecs.BOM_UTF8)
        while first.isspace():
            first = stream.readline(_PEEK)
        if first.lstrip().startswith(b"["):
            return _array_format(file, first + stream.read(_PEEK))
        if not first.endswith(b"\n"):
            first += stream.readline()
        row = _parsed(first)
        if isinstance(row, dict):
            if column in row:
                return "json lines"
            if stream.readline(_PEEK).lstrip().startswith(b"{"):
                return missing_column(column, f"{path}, line 1,", row)
        content = first + stream.read()
    whole = _parsed(content)
    if not isinstance(whole, dict):
        return "text"
    lists = [name for name, value in whole.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if isinstance(whole.get(column), str):
        return "json"
    if lists:
        return LineartimeError(
            f'{path} is a JSON object with its records in "{lists[0]}": write that list alone, or one record in each line.'
        )
    return "text"


def _array_format(file: SourceFile, beginning: bytes) -> Format | LineartimeError:
    """The format of a JSON array, by its first record; the whole file is only read if that does not end in the beginning."""
    text = beginning.decode(errors="ignore").lstrip()[1:].lstrip()
    try:
        records = [json.JSONDecoder().raw_decode(text)[0]]
    except (ValueError, RecursionError):
        try:
            with file.open() as stream:
                records = _loaded(str(file.path), stream.read(), 0)
        except LineartimeError as error:
            return error
    for record in records[:1]:
        try:
            _record_text(file, record, 1)
        except LineartimeError as error:
            return error
    return "json"


def _parsed(content: bytes) -> Any:
    """The value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def read_records(file: SourceFile) -> Iterator[str]:
    """Yield the texts of a file of records. Raises LineartimeError, naming file and place, on unreadable text."""
    match file_format(file):
        case "json lines":
            return _json_lines(file)
        case "json":
            return _json(file)
        case "csv":
            return csv_records(file)
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
    """The records of an array, or the single record of a file. The whole file is read into memory."""
    with file.open() as stream:
        whole = _loaded(str(file.path), stream.read(), 0)
    if isinstance(whole, dict):
        yield _text(str(file.path), whole, file.column, is_first=True)
        return
    for number, record in enumerate(whole, 1):
        yield _record_text(file, record, number)


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
    if not isinstance(record, dict):
        raise LineartimeError(
            f'{where} is {record!r:.40}, but must be an object with a "{column}": correct it, or leave it out.'
        )
    if column not in record and is_first:
        raise missing_column(column, where, record)
    if column not in record:  # the records before it have the column, so that no other name would help
        raise LineartimeError(f'{where} has no "{column}": correct it, or leave it out.')
    text = _value(where, column, record[column])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = error.reason
        raise LineartimeError(
            f"{where} has an incomplete character in its text ({reason}): correct it, or leave it out."
        ) from None
    return text


def _value(where: str, column: str, value: object) -> str:
    """The text in a column of a record; empty for null."""
    if value is None or isinstance(value, str):
        return value or ""
    raise LineartimeError(f'{where} has {value!r:.40} in "{column}" instead of a text: correct it, or leave it out.')


def _parquet(file: SourceFile) -> Iterator[str]:
    path, column = file.path, file.column
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_extra("pyarrow", "data", f"Reading {path}") from None
    number = 0
    expansion = Expansion(file)
    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise missing_column(column, str(path), names)
            # Few rows at a time: a row may be a whole book.
            for batch in table.iter_batches(batch_size=16, columns=[column]):
                for value in batch.column(0):
                    text = _value(f"{path}, row {number},", column, value.as_py())
                    expansion.count(len(text))
                    yield text
                    number += 1
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise LineartimeError(f"{path}, row {number}, is not UTF-8 text ({byte}): write it anew, or leave it out.") from None
    except OSError as error:
        raise (damaged(path, error) if error.errno is None else file_error("read", path, error)) from None
    except arrow.ArrowException as error:
        raise damaged(path, error) from None
