"""Records of JSON lines, CSV, TSV (which has no quotes) and Parquet, with their places, one after another."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lineartime.errors import ArgumentError, LineartimeError, first_line, reporting_file_errors
from lineartime.fields import shown
from lineartime.files import parse

SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")


def read_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each record of a file, with its place, such as "line 3".

    Raises:
        ArgumentError: for a file of another kind, by its name.
        LineartimeError: if the file cannot be read, or a record of it is something else.
    """
    if file.suffix not in SUFFIXES:
        raise ArgumentError("data", f"is {file}, but must be a file of records: {', '.join(SUFFIXES)}.")
    with reporting_file_errors("read", file):
        yield from {".jsonl": read_lines, ".parquet": _parquet}.get(file.suffix, _csv)(file)


def read_lines(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects in the lines of a file, with their places. Raises LineartimeError for anything else."""
    with reporting_file_errors("read", file), file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                where = f"line {number:,}"
                try:
                    record = parse_text(line)
                except ValueError as error:
                    raise LineartimeError(f"{file} has {where} that cannot be read ({error}): correct it.") from None
                if not isinstance(record, dict):
                    raise LineartimeError(f"{file} has {where} that is {shown(record)}, but it must be an object.")
                yield where, record


def parse_text(content: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, also for half of a character, which no tokenizer reads."""
    value = parse(content)
    if b"\\ud" in content.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it holds half of a character, a surrogate") from None
    return value


def _csv(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # of the whole process; a text may be a book
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
            rows = csv.DictReader(opened, strict=True, **tabs)
            for record in rows:
                where = f"line {rows.line_num:,}"
                if None in record or None in record.values():
                    raise LineartimeError(f"{file} has {where} with another number of fields than line 1: correct it.")
                yield where, record
    except (csv.Error, UnicodeDecodeError) as error:
        raise LineartimeError(f"{file} is not CSV in UTF-8 ({first_line(error)}): correct it.") from None


def _parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=64):
                for record in batch.to_pylist():
                    number += 1
                    yield f"row {number:,}", record
    except pyarrow.ArrowException as error:
        raise LineartimeError(f"{file} is damaged or not Parquet ({first_line(error)}): fetch it again.") from None
