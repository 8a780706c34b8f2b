"""Token files: a split of a corpus, encoded once, kept on disk and memory-mapped, so that it may be larger than memory."""

import codecs
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lineartime.data.corpora import Corpus, Document, Split
from lineartime.data.tokenizers import Tokenizer, encode_blocks, fingerprint
from lineartime.errors import LineartimeError, cannot

_BLOCK = 1 << 20  # bytes of text in memory at a time
_FORMAT = 1  # part of every file's name: raise it when the same input would give other tokens


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a split, in one row: every document is followed by an end-of-document token.

    Attributes:
        name: what to call it in messages.
        tokens: unsigned integers [n], memory-mapped.
        n_bytes: the bytes of the text they encode.
    """

    name: str
    tokens: NDArray[np.unsignedinteger]
    n_bytes: int

    def __len__(self) -> int:
        return len(self.tokens)


def default_cache() -> Path:
    """The folder in which token files are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineartime"


def token_stream(corpus: Corpus, split: Split, tokenizer: Tokenizer, cache: Path) -> TokenStream:
    """The tokens of a split; encoded, block by block, only if the cache does not hold them already.

    Raises:
        LineartimeError: for text that cannot be read or is not UTF-8, or a cache that cannot be written.
    """
    documents = corpus.splits[split]
    dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    folder = cache / _key(documents, tokenizer)
    if not (folder / "tokens.json").exists():
        _write(folder, documents, tokenizer, dtype)
    try:
        facts = json.loads((folder / "tokens.json").read_text())
        size = (folder / "tokens.bin").stat().st_size
        if size != facts["n_tokens"] * dtype.itemsize:
            raise LineartimeError(f"The token file {folder} is damaged: delete that folder, then run the command again.")
        tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise cannot("read", folder, error) from None
    except (ValueError, KeyError):
        raise LineartimeError(f"The token file {folder} is damaged: delete that folder, then run the command again.") from None
    return TokenStream(f"the {split} split of {corpus.name}", tokens, facts["n_bytes"])


def _key(documents: list[Document], tokenizer: Tokenizer) -> str:
    """A name for the tokens, which changes with the tokenizer and with the path, size or date of any file."""
    parts = [str(_FORMAT), fingerprint(tokenizer)]
    for document in documents:
        parts.append(f"{document.path.resolve()}:{document.start}:{document.stop}:{document.path.stat().st_mtime_ns}")
    return hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()[:20]


def _write(folder: Path, documents: list[Document], tokenizer: Tokenizer, dtype: np.dtype[Any]) -> None:
    """Write the tokens and then, as the sign that they are complete, the facts about them."""
    partial = folder / f"tokens.{os.getpid()}.partial"
    n_tokens = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.partial"):
            if time.time() - left.stat().st_mtime > 3600:  # of a killed process: one that lives writes all the time
                left.unlink(missing_ok=True)
        try:
            with partial.open("wb") as stream:
                for document in documents:
                    for ids in encode_blocks(tokenizer, _text_blocks(document)):
                        stream.write(ids.astype(dtype).tobytes())
                        n_tokens += len(ids)
                    stream.write(np.array([tokenizer.end_of_document], dtype).tobytes())
                    n_tokens += 1
            partial.replace(folder / "tokens.bin")
        finally:
            partial.unlink(missing_ok=True)
        facts = {"n_tokens": n_tokens, "n_bytes": sum(document.stop - document.start for document in documents)}
        partial.write_text(json.dumps(facts))
        partial.replace(folder / "tokens.json")
    except OSError as error:
        raise cannot("write", folder, error) from None


def _text_blocks(document: Document) -> Iterator[str]:
    """The text of a document, block by block; LineartimeError where it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with document.path.open("rb") as stream:
            position = document.start
            while position < document.stop:
                stream.seek(position)
                block = stream.read(min(_BLOCK, document.stop - position))
                if not block:
                    break
                held_back = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=position + len(block) >= document.stop)
                except UnicodeDecodeError as error:
                    offset = position - held_back + error.start
                    byte = error.object[error.start]
                    raise LineartimeError(
                        f"{document.path} is not UTF-8 text (byte 0x{byte:02x} at offset {offset}): "
                        "convert it to UTF-8 or take it out of --data."
                    ) from None
                position += len(block)
                yield text
    except OSError as error:
        raise cannot("read", document.path, error) from None
