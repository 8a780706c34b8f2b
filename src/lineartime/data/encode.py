"""Encoding: documents in, shards of tokens out, with counts of bytes, words and tokens."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lineartime.data.readers import BLOCK
from lineartime.data.tokenizers import Tokenizer, whole_lines
from lineartime.files import sha256

SHARD = 1 << 26  # tokens in a file
FACTS = "facts.json"
_AT_ONCE = 4 * BLOCK * (os.cpu_count() or 1)  # characters to encode together, on all cores

Integers = NDArray[np.unsignedinteger[Any]]


def batches(documents: Iterator[Iterator[str]]) -> Iterator[list[str | None]]:
    """Texts to encode together, with None after the last one of each document."""
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


class Writer:
    """Writes tokens to shards, and counts tokens, bytes and words."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._shards: list[IO[bytes]] = []
        self._in_word = False
        self.n_tokens = self._n_bytes = self._n_words = 0

    def __enter__(self) -> "Writer":
        self._open_shard()  # at least one, even for an empty text
        return self

    def __exit__(self, *_: object) -> None:
        self._shards[-1].close()

    def add(self, texts: list[str | None], max_tokens: int | None) -> None:
        """Encode and write these texts; None is the end of a document."""
        encoded = iter(self._tokenizer.encode_batch([text for text in texts if text is not None]))
        for text in texts:
            if text is None:
                self._write(np.array([self._tokenizer.end_of_document], self._dtype))
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

    def finish(self) -> dict[str, str]:
        """Write the facts about the tokens, after the shards are closed, and return the files with their digests."""
        files = [Path(shard.name) for shard in self._shards]
        digests = {file.name: sha256(file) for file in files}
        facts = {
            "dtype": self._dtype.name,
            "n_tokens": self.n_tokens,
            "n_bytes": self._n_bytes,
            "n_words": self._n_words,
            "sha256": digests,
        }
        (self._folder / FACTS).write_text(json.dumps(facts, indent=1))
        return digests

    def _count(self, text: str) -> None:
        """Count bytes and words; a word may continue in the next text of the document."""
        self._n_bytes += len(text.encode())
        words = len(text.split())
        self._n_words += words - (self._in_word and words > 0 and not text[0].isspace())
        if text:
            self._in_word = not text[-1].isspace()

    def _write(self, tokens: Integers) -> None:
        while len(tokens):
            if self.n_tokens == SHARD * len(self._shards):
                self._shards[-1].close()
                self._open_shard()
            part = tokens[: SHARD * len(self._shards) - self.n_tokens]
            self._shards[-1].write(part.tobytes())
            self.n_tokens += len(part)
            tokens = tokens[len(part) :]

    def _open_shard(self) -> None:
        self._shards.append((self._folder / f"tokens-{len(self._shards):05d}.bin").open("wb"))
