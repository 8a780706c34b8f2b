"""Shards: files of token ids, read where they lie, and the kinds of files that hold ids or texts.

A reader is one function from a file to arrays of ids with the ends of their documents. Formats: Megatron (.bin and .idx of
megatron-core), llm.c and modded-nanogpt (.bin with a header), NumPy, ids without a header (nanoGPT's .bin, OLMo's .npy), and
columns of ids in Arrow, Parquet and MDS.
"""

import hashlib
import mmap
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lineartime.data.readers import AGAIN, SourceFile, batches, column_of, damaged, read_records, reporting
from lineartime.errors import LineartimeError, first_line, reporting_file_errors
from lineartime.files import read_plain, remove_abandoned

Ids = NDArray[np.integer[Any]]
_FORMAT = 1  # part of the name of every copy: increase it when the same file would give other ids
_BLOCK = 1 << 16  # tokens that are looked at together
_ROWS = 1 << 10  # of Parquet or Arrow, that are read together
_MEGATRON = b"MMIDIDX\0\0"
_INDEX = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_CODES = {1: "u1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # dtypes of Megatron
_LLM_C = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}  # the dtype and the version by the number at the beginning
IDS = (".bin", ".npy", ".idx")
"""The suffixes of files that may hold token ids, which their first bytes tell."""
SIDE_FILES = {"index.json", "state.json", "dataset_info.json", "dataset_dict.json", "tokenizer.json"}
"""Files that belong to shards, beside every .idx."""


class Piece(NamedTuple):
    """Token ids from a file, mapped into memory, and where their documents end."""

    path: Path
    ids: Ids  # [n]
    ends: NDArray[np.int64] | None = None  # [D], ascending: the ids up to the end of each document; None if only ids tell
    first: int = 0  # the place of the first one in the file
    is_told: bool = True  # whether these are the ends of all documents

    def part(self, start: int, stop: int, ends: bool) -> "Piece":
        """The ids from `start` to `stop`, where a document is cut if it `ends` there."""
        cut = self._replace(ids=self.ids[start:stop], first=self.first + start)
        if self.ends is None:
            return cut._replace(ends=np.array([stop - start]), is_told=False) if ends else cut
        low, high = np.searchsorted(self.ends, (start, stop), side="right")
        inside = self.ends[low:high] - start
        return cut._replace(ends=np.append(inside, stop - start) if ends and (stop - start) not in inside[-1:] else inside)


def unmarked(ids: Any) -> Any:
    """Ids of `Shards`, int64 in an array or a tensor, without marks: ~x becomes x."""
    return ids ^ (ids >> 63)


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype of a file of the ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Shards:
    """The ids of pieces as one sequence. A slice is int64, in which the last id x of a document that its file ends is ~x.

    Raises LineartimeError, naming file and place, for an id that the vocabulary does not have, whenever one is read.
    """

    def __init__(self, pieces: Iterable[Piece], vocab_size: int, limit: int | None = None) -> None:
        self._pieces, self._vocab_size = [piece for piece in pieces if len(piece.ids)], vocab_size
        self._starts: list[int] = np.cumsum([0, *(len(piece.ids) for piece in self._pieces)]).tolist()
        self._length: int = min(self._starts[-1], limit or self._starts[-1])
        told = [piece.ends for piece in self._pieces if piece.ends is not None and piece.is_told]
        begun = (  # the documents of each piece that begin before the limit
            min(len(ends), int(np.searchsorted(ends, self._length - start)) + 1)
            for ends, start in zip(told, self._starts, strict=False)
            if start < self._length
        )
        self.n_documents = sum(begun) if len(told) == len(self._pieces) else 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, places: slice) -> NDArray[np.int64]:
        start, stop, _ = places.indices(self._length)
        found = np.empty(max(0, stop - start), np.int64)
        index, filled = bisect_right(self._starts, start) - 1, 0
        while filled < len(found):
            piece, first = self._pieces[index], start + filled - self._starts[index]
            ids = piece.ids[first : first + len(found) - filled]
            out = found[filled : filled + len(ids)]
            out[:] = ids
            if out.view(np.uint64).max() >= self._vocab_size:  # a negative number is large
                place = int(np.argmax(out.view(np.uint64) >= self._vocab_size))
                wrong = f"{piece.path} has the id {ids[place]} at token {piece.first + first + place:,}"
                known = f"but the vocabulary has {self._vocab_size:,} tokens"
                raise LineartimeError(f"{wrong}, {known}: give the tokenizer that made the ids (`tokenizer`).")
            if piece.ends is not None:
                low, high = np.searchsorted(piece.ends, (first, first + len(ids)), side="right")
                last = piece.ends[low:high] - (first + 1)
                out[last] = ~out[last]
            filled, index = filled + len(ids), index + 1
        return found

    def digest(self) -> str:
        """A string that differs between other ids: of all, as of encoded text, or of 64 blocks of many. It checks them, too."""

        def ids(places: slice) -> bytes:
            content: bytes = unmarked(self[places]).astype(id_dtype(self._vocab_size)).tobytes()
            return content

        length = len(self)
        if length <= 64 * _BLOCK:
            return hashlib.sha256(hashlib.sha256(ids(slice(None))).hexdigest().encode()).hexdigest()[:12]
        found = hashlib.sha256(str(length).encode())
        for start in (*range(0, length, length // 64), length - _BLOCK):
            found.update(ids(slice(start, start + _BLOCK)))
        return found.hexdigest()[:12]


# Kinds -------------------------------------------------------------------------------------------------------------------

_BY_NAME = {"MDS": r"\.mds(\.\w+)?", "Arrow": r"\.arrow", "WebDataset": r"\.tar(\.(gz|bz2|xz|zst))?"}


def shard_kind(path: Path, raw_ids: str | None) -> str:
    """The kind of a shard, by its suffix and its first bytes; empty for other files. Raises LineartimeError for half a pair."""
    suffix, pair = path.suffix.lower(), path.with_suffix(".bin")
    if suffix not in IDS:
        return next((kind for kind, name in _BY_NAME.items() if re.search(rf"{name}$", path.name, re.IGNORECASE)), "")
    with reporting(path), path.open("rb") as stream:
        head = stream.read(len(_MEGATRON))
    if suffix == ".idx":
        if head == _MEGATRON and not pair.is_file():
            raise LineartimeError(f"{path} has no {pair.name} beside it, which holds its ids: fetch that, too.")
        return ""
    if suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "Megatron"
    if int.from_bytes(head[:4], "little") in _LLM_C:
        return "llm.c"
    if head.startswith(b"\x93NUMPY"):
        return "NumPy"
    index = path.with_name("index.json")
    if index.is_file() and "chunks" in read_plain(index, AGAIN):
        return "litdata"
    return "raw ids" if raw_ids else ""


def shard_order(folder: Path, kind: str) -> list[Path] | None:
    """The shards that a file beside them lists, in its order; None without such a file.

    Raises LineartimeError if there has to be one, or if a shard is missing.
    """
    if kind not in ("Arrow", "MDS", "litdata"):
        return None
    index = folder / ("state.json" if kind == "Arrow" else "index.json")
    if not index.is_file():
        if kind == "Arrow":
            return None
        raise LineartimeError(f"{folder} holds {kind} without an index.json, which lists its shards: fetch that, too.")
    try:
        if kind == "MDS":
            shards = [(each["raw_data"]["basename"], each.get("zip_data")) for each in read_plain(index, AGAIN)["shards"]]
            names = [packed["basename"] if packed and not (folder / raw).is_file() else raw for raw, packed in shards]
        else:
            names = [each["filename"] for each in read_plain(index, AGAIN)["_data_files" if kind == "Arrow" else "chunks"]]
    except (AttributeError, KeyError, TypeError):
        raise damaged(index, f"it does not list shards as that of {kind} does") from None
    for name in names:
        with reporting(folder / name):
            (folder / name).stat()
    return [folder / name for name in names]


# Readers -----------------------------------------------------------------------------------------------------------------


def mapped(path: Path, dtype: str | np.dtype[Any], offset: int = 0, count: int | None = None) -> Ids:
    """The numbers of a file from an offset on, in memory by map; they have to be `count` if that is known."""
    with reporting(path), path.open("rb") as opened:
        size, width = path.stat().st_size - offset, np.dtype(dtype).itemsize
        if size % width or size < 0 or count not in (None, size // width):
            said = "" if count is None else f", and {count:,} ids are stated"
            raise damaged(path, f"its ids take {size:,} bytes, of {width} each{said}")
        if not size:
            return np.zeros(0, dtype)
        found = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(found, "madvise"):  # windows are read in any order: what lies around them would be read for nothing
        found.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(found, dtype, offset=offset)


def _megatron(file: SourceFile) -> Iterator[Piece]:
    path, index = file.path, file.path.with_suffix(".idx")
    with reporting(index):
        content = np.memmap(index, "u1", "r") if index.stat().st_size else np.zeros(0, "u1")
    if len(content) < _INDEX.itemsize or content[: len(_MEGATRON)].tobytes() != _MEGATRON:
        raise damaged(index, "it does not begin as an index of Megatron")
    _, version, code, n, n_documents = content[: _INDEX.itemsize].view(_INDEX)[0].tolist()
    if version != 1 or code not in _CODES:
        raise LineartimeError(
            f"{index} has version {version} and dtype {code}, but must have version 1 and whole numbers: write it anew."
        )
    bounds = np.cumsum([_INDEX.itemsize, 4 * n, 8 * n, 8 * n_documents]).tolist()
    if not 0 < n_documents <= len(content) or bounds[-1] > len(content):
        raise damaged(index, f"it states {n:,} sequences and {n_documents:,} ends, but has {len(content):,} bytes")
    lengths, places, documents = (
        content[start:stop].view(dtype) for (start, stop), dtype in zip(pairwise(bounds), ("<i4", "<i8", "<i8"), strict=True)
    )
    ids = mapped(path, _CODES[code])
    width, total = ids.itemsize, 0
    for start in range(0, n, _BLOCK):  # not at once: there may be many millions
        ends = total + lengths[start : start + _BLOCK].cumsum(dtype=np.int64) * width
        if (places[start : start + _BLOCK] != np.append(total, ends[:-1])).any() or lengths[start : start + _BLOCK].min() < 0:
            raise damaged(index, f"some sequence from {start:,} on does not begin where the one before it ends")
        total = int(ends[-1])
    if total != ids.nbytes:
        raise damaged(path, f"it has {len(ids):,} ids, but {index.name} states {total // width:,}")
    if documents[0] != 0 or documents[-1] != n or (np.diff(documents) < 0).any():
        raise damaged(index, "its documents do not ascend to its last sequence")
    inside = documents[1:][documents[1:] < n]
    yield Piece(path, ids, np.append(places[inside] // width, np.full(len(documents) - 1 - len(inside), len(ids))))


def write_ids(path: Path, dtype: str, blocks: Iterable[tuple[Ids, NDArray[np.int64]]], *, index: bool = True) -> None:
    """Write blocks of ids, with the ends of documents in each, as .bin and, for Megatron, the .idx of documents.

    Raises LineartimeError for an id that the dtype does not hold.
    """
    lengths, held, code = array("i"), 0, next(code for code, own in _CODES.items() if own == dtype)
    with path.open("wb") as stream:
        for ids, ends in blocks:
            small = ids.astype(dtype)
            if (small != ids).any():
                raise LineartimeError(f"{path} cannot hold ids above {np.iinfo(dtype).max:,}: give a smaller vocabulary.")
            stream.write(small.tobytes())
            lengths.extend(np.diff(ends, prepend=-held).tolist())
            held = len(ids) - int(ends[-1]) if len(ends) else held + len(ids)
    lengths.extend([held] if held else [])
    n, sizes = len(lengths), np.frombuffer(lengths, np.intc)
    head = np.array([(_MEGATRON, 1, code, n, n + 1)], _INDEX).tobytes()
    places = (sizes.cumsum(dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    if index:
        whole = head + sizes.astype("<i4").tobytes() + places.tobytes() + np.arange(n + 1, dtype="<i8").tobytes()
        path.with_suffix(".idx").write_bytes(whole)


def _llm_c(file: SourceFile) -> Iterator[Piece]:
    with reporting(file.path), file.path.open("rb") as stream:
        header = np.frombuffer(stream.read(1024).ljust(1024, b"\0"), "<i4").tolist()
    magic, version, count = header[:3]
    dtype, known = _LLM_C[magic]
    if version != known:
        raise LineartimeError(f"{file.path} has version {version} of its format, but must have {known}: write it anew.")
    yield Piece(file.path, mapped(file.path, dtype, 1024, count))


def _array(file: SourceFile) -> Iterator[Piece]:
    try:
        with reporting(file.path):
            raw = file.raw_ids if file.shard == "raw ids" else None
            ids = mapped(file.path, raw) if raw else np.lib.format.open_memmap(file.path, mode="r")
    except (SyntaxError, TokenError, ValueError) as error:  # of a header that NumPy cannot parse
        raise damaged(file.path, first_line(error)) from None
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise LineartimeError(
            f"{file.path} has {ids.dtype} {list(ids.shape)}, but must have one row of whole numbers: leave it out (`exclude`)."
        )
    yield Piece(file.path, np.asarray(ids))


def _table(file: SourceFile) -> Iterator[Piece]:
    first = 0
    for batch in batches(file, _ROWS, file.columns):
        import pyarrow.compute

        rows = batch.column(name := column_of(batch.schema.names, file))
        ids = rows.flatten() if "list" in str(rows.type) else rows
        if ids is rows or not pyarrow.types.is_integer(ids.type) or ids.null_count:
            found = f'{file.path} has {rows.type} in "{name}"'
            raise LineartimeError(f"{found}, but must have lists of whole numbers without null: choose another column.")
        lengths = pyarrow.compute.list_value_length(rows).fill_null(0).to_numpy(zero_copy_only=False)
        yield Piece(file.path, ids.to_numpy(), lengths.cumsum(dtype=np.int64), first)
        first += len(ids)


def _mds(file: SourceFile) -> Iterator[Piece]:
    for place, record in read_records(file, file.columns):
        ids = record[name := column_of(record, file)]
        if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
            found = f'{file.path}, {place}, has {type(ids).__name__} in "{name}"'
            raise LineartimeError(f"{found}: choose another column, or say the dtype of ids in bytes by `raw_ids`.")
        yield Piece(file.path, ids, np.array([len(ids)]))


_READERS: dict[str, Callable[[SourceFile], Iterator[Piece]]] = {
    "Megatron": _megatron,
    "llm.c": _llm_c,
    "NumPy": _array,
    "raw ids": _array,
    "Arrow": _table,
    ".parquet": _table,
    "MDS": _mds,
}


def read_pieces(file: SourceFile, cache: Path) -> list[Piece]:
    """The ids of a file. Parquet and MDS, which cannot be mapped, are copied into the cache the first time, as Megatron's."""
    read = _READERS[file.format_suffix]
    if file.format_suffix not in (".parquet", "MDS"):
        return list(read(file))
    key = f"ids:{_FORMAT}:{file.path.resolve()}:{file.version}:{file.column}:{file.raw_ids}"
    copy = cache / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:20]}.bin"
    if not (copy.exists() and copy.with_suffix(".idx").exists()):
        with reporting_file_errors("write", copy):
            cache.mkdir(parents=True, exist_ok=True)
            remove_abandoned(cache, r"ids-\w+")
            with TemporaryDirectory(dir=cache, prefix="ids-") as folder:
                written = Path(folder, copy.name)
                write_ids(written, "<i4", ((piece.ids, piece.ends) for piece in read(file) if piece.ends is not None))
                written.replace(copy)
                written.with_suffix(".idx").replace(copy.with_suffix(".idx"))
    try:
        return [piece._replace(path=file.path) for piece in _megatron(replace(file, path=copy))]
    except LineartimeError:
        raise LineartimeError(f"{copy} is damaged or cut off: delete it to copy the ids of {file.path} again.") from None
