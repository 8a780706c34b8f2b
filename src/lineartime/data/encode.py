"""Encode documents into shards of tokens, and count documents, bytes, words and tokens."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lineartime.data.readers import BLOCK
from lineartime.data.tokenizers import Tokenizer, whole_lines
from lineartime.fields import Count, Digest, Matching
from lineartime.host import available_cores

SHARD = 1 << 26  # tokens in a file
FACTS = "facts.json"
_AT_ONCE = 4 * BLOCK * len(available_cores())  # characters to encode together, on all cores

ShardName = Annotated[str, Matching(r"tokens-\d{5,9}\.bin", "tokens- and a number, .bin")]
Integers = NDArray[np.unsignedinteger[Any]]


def text_batches(documents: Iterator[Iterator[str]], max_tokens: int | None = None) -> Iterator[list[str | None]]:
    """Yield batches of texts to encode together, with None after the last text of each document.

    If only the first `max_tokens` are wanted, the batches are small: a token is seldom longer than 8 characters.
    """
    at_once = _AT_ONCE if max_tokens is None else min(_AT_ONCE, max(BLOCK, 8 * max_tokens))
    batch: list[str | None] = []
    size = 0
    for document in documents:
        empty = True
        for text in whole_lines(document):
            empty = False
            batch.append(text)
            size += len(text)
            if size >= at_once:
                yield batch
                batch, size = [], 0
        if not empty:
            batch.append(None)
            size += 1
    if batch:
        yield batch


@dataclass(frozen=True)
class EncodedTextInfo:
    """Facts about an encoded text, stored in facts.json.

    Attributes:
        dtype: the type of the tokens.
        n_tokens: the number of tokens.
        n_bytes: the number of bytes of the text.
        n_words: the number of words of the text.
        sha256: the digest of each file.
        n_documents: the number of documents; None for tokens that an earlier version encoded.
    """

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

    def add(self, texts: list[str | None], max_tokens: int | None) -> None:
        """Encode and write texts, up to `max_tokens` in total. None marks the end of a document."""
        encoded = iter(self._tokenizer.encode_batch([text for text in texts if text is not None]))
        for text in texts:
            if text is None:
                self._write(np.array([self._tokenizer.end_of_document], self._dtype))
                self._in_word = self._in_document = False
            else:
                self._n_documents += not self._in_document
                self._in_document = True
                ids = next(encoded)
                if max_tokens is not None and self.n_tokens + len(ids) > max_tokens:
                    ids = ids[: max_tokens - self.n_tokens]
                    text = self._tokenizer.beginning(text, len(ids))
                self._count(text)
                self._write(ids.astype(self._dtype))
            if max_tokens is not None and self.n_tokens >= max_tokens:
                return

    def finish(self) -> dict[str, str]:
        """Write facts.json, and return the digest of each file."""
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
        return self._digests

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
