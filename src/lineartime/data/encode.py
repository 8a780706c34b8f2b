"""Encode documents into shards of tokens, and count documents, bytes, words and tokens."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lineartime.data.local_files import BLOCK
from lineartime.data.seams import Seam
from lineartime.data.tokenizers import Tokenizer
from lineartime.fields import Count, Digest, Matching

SHARD = 1 << 26  # tokens in a file
FACTS = "facts.json"
_SHARED = 1 << 11  # characters of a document that two of its parts share
_AT_ONCE = 4 * BLOCK * (os.cpu_count() or 1)  # characters to encode together, on all cores

ShardName = Annotated[str, Matching(r"tokens-\d{5,9}\.bin", "tokens- and a number, .bin")]
Integers = NDArray[np.unsignedinteger[Any]]


class Part(NamedTuple):
    """A part of a document, from its left to its right seam, which are empty at the ends of the document.

    Attributes:
        around: the text of the part, and around it the rest of the texts of the seams.
        around_ids: the tokens of that text; none before they are known.
    """

    around: str
    left: Seam
    right: Seam
    around_ids: NDArray[np.int64] = Seam().ids

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.around[self.left.end : len(self.around) - len(self.right.text) + self.right.end]

    @property
    def ids(self) -> NDArray[np.int64]:
        """The tokens of the part: int64 [n]."""
        return self.around_ids[self.left.before : len(self.around_ids) - len(self.right.ids) + self.right.before]


def encoded(tokenizer: Tokenizer, documents: Iterable[Iterator[str]], at_once: int) -> Iterator[Part | None]:
    """Encode documents, each given as blocks of text: a document has the tokens that the tokenizer gives its whole text.

    `at_once` is the number of characters to encode together, on all cores. Yields the parts of each document that has any text,
    and None after its last one.
    """
    held: Part | None = None
    for batch in _batches(tokenizer, documents, at_once):
        for part, ids in zip(batch, tokenizer.encode_batch([part.around for part in batch]), strict=True):
            part = part._replace(around_ids=ids)
            if held is not None and part.left.joins(held.around_ids, ids):
                yield held
            elif held is not None:  # what is before the text of the seam changes tokens behind it
                text = held.around + part.around[len(part.left.text) :]
                part = Part(text, held.left, part.right, tokenizer.encode(text))
            held = part
            if not part.right.text:
                yield from (part, None)
                held = None


def _batches(tokenizer: Tokenizer, documents: Iterable[Iterator[str]], at_once: int) -> Iterator[list[Part]]:
    """Yield batches of parts to encode together."""
    batch: list[Part] = []
    size = 0
    for part in chain.from_iterable(_parts(tokenizer, document) for document in documents):
        batch.append(part)
        size += len(part.around)
        if size >= at_once:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(tokenizer: Tokenizer, blocks: Iterator[str]) -> Iterator[Part]:
    """Cut a document that is longer than a block into parts of a block, or longer ones where there is no seam."""
    text, left, size = "", Seam(), BLOCK
    for block in blocks:
        text += block
        while len(text) > size:
            right = tokenizer.seam(text[size - _SHARED : size])
            if right is None:
                size += max(_SHARED, size // 16)
                continue
            yield Part(text[:size], left, right)
            text, left, size = text[size - _SHARED :], right, BLOCK
    if text:
        yield Part(text, left, Seam())


@dataclass(frozen=True)
class EncodedTextInfo:
    """Facts about an encoded text, stored in facts.json. Earlier versions did not count documents."""

    dtype: Literal["uint16", "uint32"]
    n_tokens: Count
    n_bytes: Count
    n_words: Count
    sha256: dict[ShardName, Digest]
    n_documents: Count | None = None


class ShardWriter:
    """Writes tokens to shards, and counts tokens, documents, bytes and words."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._shard: IO[bytes] | None = None
        self._hasher = hashlib.sha256()
        self._digests: dict[str, str] = {}
        self._in_word = self._in_document = False
        self.n_tokens = self._n_bytes = self._n_words = self._n_documents = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_shard()

    def add(self, documents: Iterable[Iterator[str]], max_tokens: int | None, advance: Callable[[int], None]) -> None:
        """Encode and write documents, up to `max_tokens` in total, and call `advance` with the characters of each part.

        If only the first `max_tokens` are wanted, little is encoded at once: a token is seldom longer than 8 characters.
        """
        at_once = _AT_ONCE if max_tokens is None else min(_AT_ONCE, max(BLOCK, 8 * max_tokens))
        for part in encoded(self._tokenizer, documents, at_once):
            if part is None:
                self._write(np.array([self._tokenizer.end_of_document], self._dtype))
                self._in_word = self._in_document = False
            else:
                self._n_documents += not self._in_document
                self._in_document = True
                ids, text = part.ids, part.text
                if max_tokens is not None and self.n_tokens + len(ids) > max_tokens:
                    ids = ids[: max_tokens - self.n_tokens]
                    text = self._tokenizer.beginning(part.around, part.left.before + len(ids))[part.left.end :]
                self._count(text)
                self._write(ids.astype(self._dtype))
                advance(len(text))
            if max_tokens is not None and self.n_tokens >= max_tokens:
                return

    def finish(self) -> None:
        """Write facts.json, after all tokens."""
        if not self._digests:
            self._open_shard()
            self._close_shard()
        facts = EncodedTextInfo(
            dtype="uint16" if self._dtype == np.uint16 else "uint32",
            n_tokens=self.n_tokens,
            n_bytes=self._n_bytes,
            n_words=self._n_words,
            n_documents=self._n_documents,
            sha256=self._digests,
        )
        (self._folder / FACTS).write_text(json.dumps(vars(facts), indent=1))

    def _count(self, text: str) -> None:
        """Count bytes and words; a word may continue in the next text of the document."""
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
