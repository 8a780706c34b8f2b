"""Token files: a split of a corpus, encoded once, kept on disk in shards and memory-mapped, so that it may exceed memory.

A folder of the cache is made under another name and renamed when it is whole. It holds

    tokens-00000.bin, ...   uint16 or uint32, `SHARD` tokens in each but the last
    ends.bin                int64, the position after the end of each document
    facts.json              how much there is, and the SHA-256 of each file

The digest of a file is checked when it is opened, unless its size and date are those at which it was last found right.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lineartime.data.corpora import Corpus
from lineartime.data.progress import Progress
from lineartime.data.readers import BLOCK, Split
from lineartime.data.tokenizers import Tokenizer, fingerprint, whole_lines
from lineartime.errors import LineartimeError, cannot

SHARD = 1 << 26  # tokens in a file
_AT_ONCE = 4 * BLOCK * (os.cpu_count() or 1)  # characters that are encoded together, on all cores
_FORMAT = 2  # part of every folder's name: raise it when the same input would give other tokens
_FACTS = "facts.json"
_VERIFIED = "verified.json"

Integers = NDArray[np.unsignedinteger[Any]]


class Tokens(Protocol):
    """A row of tokens: a numpy array, or several that lie on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, places: slice, /) -> Integers: ...


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a split, in one row: every document is followed by an end-of-document token.

    Attributes:
        name: what to call it in messages.
        tokens: unsigned integers [n].
        n_bytes: the bytes of the text they encode.
        n_words: the words of that text, as white space parts them.
        document_ends: int64, rising: the position after each end-of-document token.
    """

    name: str
    tokens: Tokens
    n_bytes: int
    n_words: int = 0
    document_ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.tokens)


class Shards:
    """The tokens of several files as one row, which slices read without an end of a file being seen."""

    def __init__(self, shards: list[Integers]) -> None:
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> Integers:
        start, stop, step = places.indices(len(self))
        if step != 1:
            raise ValueError(f"A step of {step} is not possible: tokens are read one after another.")
        found = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            offset = start - (int(self._ends[index]) - len(self._shards[index]))
            part = self._shards[index][offset : offset + stop - start]
            found.append(part)
            start += len(part)
            index += 1
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else self._shards[0][:0]


def default_cache() -> Path:
    """The folder in which token files are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineartime"


def token_stream(corpus: Corpus, split: Split, tokenizer: Tokenizer, cache: Path, max_tokens: int | None = None) -> TokenStream:
    """The tokens of a split; encoded, block by block, only if the cache does not hold them already.

    Args:
        corpus: the text.
        split: the part of it.
        tokenizer: what encodes it.
        cache: the folder to keep the tokens in.
        max_tokens: encode only so many from the beginning.

    Raises:
        LineartimeError: for text that cannot be read or is not UTF-8, a cache that cannot be written, or one that is damaged.
    """
    folder = cache / _key(corpus.identity(split), tokenizer, max_tokens)
    name = f"the {split} split of {corpus.name}"
    if not (folder / _FACTS).exists():
        _write(folder, corpus, split, tokenizer, max_tokens)
    return _open(folder, name)


def _key(identity: str, tokenizer: Tokenizer, max_tokens: int | None) -> str:
    """A name for the tokens, which changes with the tokenizer and with the text."""
    parts = [str(_FORMAT), fingerprint(tokenizer), str(max_tokens), identity]
    return hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()[:20]


def _open(folder: Path, name: str) -> TokenStream:
    try:
        facts = json.loads((folder / _FACTS).read_text())
        _verify(folder, facts["sha256"])
        dtype = np.dtype(facts["dtype"])
        shards = [_map(folder / file, dtype) for file in sorted(facts["sha256"]) if file.startswith("tokens-")]
        return TokenStream(
            name, Shards(shards), facts["n_bytes"], facts["n_words"], _map(folder / "ends.bin", np.dtype(np.int64))
        )
    except OSError as error:
        raise cannot("read", folder, error) from None
    except (ValueError, KeyError, TypeError):
        raise _damaged(folder, _FACTS) from None


def _map(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)


def _verify(folder: Path, digests: dict[str, str]) -> None:
    """Raise LineartimeError unless the files are what was written."""
    try:
        verified = json.loads((folder / _VERIFIED).read_text())
    except (OSError, ValueError):
        verified = {}
    before = dict(verified)
    for file, digest in digests.items():
        if not (folder / file).is_file():
            raise _damaged(folder, file)
        if verified.get(file) != _version(folder / file):
            if _digest(folder / file) != digest:
                raise _damaged(folder, file)
            verified[file] = _version(folder / file)
    if verified != before:
        _remember(folder, verified)


def _remember(folder: Path, verified: dict[str, list[int]]) -> None:
    """Keep what was verified; where the cache cannot be written, it will be verified again."""
    partial = folder / f"{_VERIFIED}.{uuid.uuid4().hex}"
    try:
        partial.write_text(json.dumps(verified))
        partial.replace(folder / _VERIFIED)
    except OSError:
        partial.unlink(missing_ok=True)


def _version(file: Path) -> list[int]:
    facts = file.stat()
    return [facts.st_size, facts.st_mtime_ns]


def _digest(file: Path) -> str:
    hasher = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def _damaged(folder: Path, file: str) -> LineartimeError:
    return LineartimeError(
        f"The token file {folder / file} is damaged: delete the folder {folder}, then run the command again."
    )


def _write(folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, max_tokens: int | None) -> None:
    """Encode into a folder of another name, and rename it; another process that does the same does no harm."""
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        partial.mkdir()
        try:
            with Progress(f"encoding {corpus.name}, {split}") as progress, _Writer(partial, tokenizer) as writer:
                for texts in _batches(corpus.documents(split)):
                    writer.add(texts, max_tokens)
                    progress.advance(sum(len(text) for text in texts if text is not None))
                    if max_tokens is not None and writer.n_tokens >= max_tokens:
                        break
            writer.finish()
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / _FACTS).exists():  # unless another process was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise cannot("write", folder, error) from None


def _remove_abandoned(cache: Path) -> None:
    """Delete what killed processes left half written: one that lives writes all the time."""
    for left in cache.glob("*.partial"):
        try:
            if time.time() - max(file.stat().st_mtime for file in (left, *left.iterdir())) > 3600:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:  # another process was faster
            continue


def _batches(documents: Iterator[Iterator[str]]) -> Iterator[list[str | None]]:
    """Texts to be encoded together, None standing after the last one of each document."""
    batch: list[str | None] = []
    size = 0
    for document in documents:
        empty = True
        for text in whole_lines(document):
            empty = False
            batch.append(text)
            size += len(text)
            if size >= _AT_ONCE:
                yield batch
                batch, size = [], 0
        if not empty:
            batch.append(None)
            size += 1
    if batch:
        yield batch


class _Writer:
    """Writes tokens to shards and counts what they encode."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._shard: IO[bytes] | None = None
        self._hasher = hashlib.sha256()
        self._digests: dict[str, str] = {}
        self._ends = array("q")
        self._in_word = False
        self.n_tokens = self._n_bytes = self._n_words = 0

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_shard()

    def add(self, texts: list[str | None], max_tokens: int | None) -> None:
        """Encode and write these texts, None being the end of a document."""
        encoded = iter(self._tokenizer.encode_batch([text for text in texts if text is not None]))
        for text in texts:
            if text is None:
                self._write(np.array([self._tokenizer.end_of_document], self._dtype))
                self._ends.append(self.n_tokens)
                self._in_word = False
            else:
                ids = next(encoded)
                if max_tokens is not None and self.n_tokens + len(ids) > max_tokens:
                    ids = ids[: max_tokens - self.n_tokens]
                    text = self._tokenizer.decode(ids.tolist())
                self._count(text)
                self._write(ids.astype(self._dtype))
            if max_tokens is not None and self.n_tokens >= max_tokens:
                return

    def finish(self) -> None:
        """Write what there is to know about the tokens."""
        if not self._digests:
            self._open_shard()
            self._close_shard()
        ends = self._folder / "ends.bin"
        ends.write_bytes(self._ends.tobytes())
        self._digests[ends.name] = _digest(ends)
        facts = {
            "dtype": self._dtype.name,
            "n_tokens": self.n_tokens,
            "n_bytes": self._n_bytes,
            "n_words": self._n_words,
            "sha256": self._digests,
        }
        (self._folder / _FACTS).write_text(json.dumps(facts, indent=1))
        _remember(self._folder, {file: _version(self._folder / file) for file in self._digests})

    def _count(self, text: str) -> None:
        """Count bytes and words; a word may go on in the next text of the document."""
        self._n_bytes += len(text.encode())
        words = len(text.split())
        self._n_words += words - (self._in_word and words > 0 and not text[0].isspace())
        if text:
            self._in_word = not text[-1].isspace()

    def _write(self, tokens: Integers) -> None:
        while len(tokens):
            if self._shard is None:
                self._open_shard()
            room = SHARD - self.n_tokens % SHARD
            data = tokens[:room].tobytes()
            assert self._shard is not None
            self._shard.write(data)
            self._hasher.update(data)
            self.n_tokens += len(tokens[:room])
            tokens = tokens[room:]
            if self.n_tokens % SHARD == 0:
                self._close_shard()

    def _open_shard(self) -> None:
        self._shard = (self._folder / f"tokens-{len(self._digests):05d}.bin").open("wb")
        self._hasher = hashlib.sha256()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._digests[Path(self._shard.name).name] = self._hasher.hexdigest()
            self._shard = None
