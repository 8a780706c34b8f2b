"""The tokens of a split: documents are encoded into a file, in a folder for each text and tokenizer, and read by memory map."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lineartime.choices import Split
from lineartime.data.corpora import Corpus
from lineartime.data.folders import SPLITS
from lineartime.data.progress import Progress
from lineartime.data.readers import BLOCK
from lineartime.data.tokenizers import Tokenizer, fingerprint
from lineartime.errors import LineartimeError, file_error
from lineartime.fields import Count, Matching
from lineartime.files import read_file, remove_abandoned

TOKENS, FACTS = "tokens.bin", "facts.json"
_FORMAT = 6  # part of every folder's name: increase it when the same input would give other tokens
_PARTIAL = r"[0-9a-f]{20}\.[0-9a-f]{32}\.partial"
_HASHED = 1 << 26  # tokens that are hashed together
_AT_ONCE = 4 * BLOCK * (os.cpu_count() or 1)  # characters to encode together, on all cores
_SHARED = 1 << 11  # characters of a document that two of its parts share
_SURE = 16  # tokens on each side of a seam that must be the same in both parts


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a split as one sequence, with an end-of-document token after every document.

    Attributes:
        name: its name in messages.
        tokens: unsigned integers [n], in memory or on disk.
        n_bytes: the number of bytes of the encoded text.
        n_words: the number of words of that text, separated by white space.
        digest: a string that differs between streams of different tokens; empty for a stream that is not on disk.
        n_documents: the number of documents, including a last one that is cut.
        is_cut: whether a token limit ended the stream before the end of the split.
    """

    name: str
    tokens: NDArray[np.unsignedinteger[Any]]
    n_bytes: int
    n_words: int = 0
    digest: str = ""
    n_documents: int = 1
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenFileInfo:
    """Facts about the tokens in a folder, stored in facts.json."""

    dtype: Literal["uint16", "uint32"]
    n_tokens: Count
    n_bytes: Count
    n_words: Count
    n_documents: Count
    digest: Annotated[str, Matching("[0-9a-f]{12}", "12 hexadecimal digits")]


def token_stream(
    corpus: Corpus, split: Split, tokenizer: Tokenizer, cache: str | Path, max_tokens: int | None = None
) -> TokenStream:
    """The tokens of a split, or its first `max_tokens`, encoded only if the folder of token files, `cache`, does not hold them.

    Raises LineartimeError for text that cannot be read or is not UTF-8, and for a cache that cannot be written or is damaged.
    """
    key = "\n".join([str(_FORMAT), fingerprint(tokenizer), str(max_tokens), corpus.identity(split)])
    folder = Path(cache) / hashlib.sha256(os.fsencode(key)).hexdigest()[:20]
    if not (folder / FACTS).exists():
        _write(folder, corpus, split, tokenizer, max_tokens)
    facts = read_file(folder / FACTS, TokenFileInfo, f"delete the folder {folder} to encode the text again")
    try:
        tokens = _mapped(folder / TOKENS, np.dtype(facts.dtype))
    except (ValueError, FileNotFoundError):  # a file that ends within a token, or is gone
        tokens = None
    except OSError as error:
        raise file_error("read", folder, error) from None
    if tokens is None or len(tokens) != facts.n_tokens:
        found = f"The token file in {folder} is damaged or cut off"
        raise LineartimeError(f"{found}: delete the folder to encode the text again.")
    name = corpus.name if split == "all" else f"the {split} split of {corpus.name}"
    is_cut = max_tokens is not None and len(tokens) >= max_tokens
    return TokenStream(name, tokens, facts.n_bytes, facts.n_words, facts.digest, facts.n_documents, is_cut)


def describe_splits(corpus: Corpus, streams: Mapping[Split, TokenStream] | None = None) -> list[str]:
    """Describe each split of a corpus in a line: its source and, if it is encoded, its numbers of documents and tokens.

    This neither reads nor encodes the text.
    """
    lines = list(corpus.notes)
    places = {split: corpus.describe(split) for split in SPLITS} | {"all": "the whole text"}
    for split, place in places.items():
        stream = (streams or {}).get(split)
        if place is not None and (stream is not None or split != "all"):
            lines.append(f"{split + ':':<12}{place}{_counts(stream)}")
    return lines


def _counts(stream: TokenStream | None) -> str:
    if stream is None:
        return ""
    first = "the first " if stream.is_cut else ""
    count = stream.n_documents
    return f": {first}{count:,} {'document' if count == 1 else 'documents'}, {len(stream):,} tokens"


def _mapped(file: Path, dtype: np.dtype[Any]) -> NDArray[np.unsignedinteger[Any]]:
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)


def _write(folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, max_tokens: int | None) -> None:
    """Encode into a temporary folder and rename it, so that processes doing the same do not disturb each other."""
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder.parent, _PARTIAL)  # other programs may use the same folder
        if folder.exists() and not (folder / FACTS).exists():  # what a cleaner of caches left
            shutil.rmtree(folder)
        partial.mkdir()
        try:
            with Progress(f"encoding {corpus.name}, {split}") as progress, (partial / TOKENS).open("wb") as file:
                counts = write_tokens(file, corpus.documents(split), tokenizer, max_tokens, progress.advance)
            dtype = _dtype(tokenizer)
            tokens = _mapped(partial / TOKENS, dtype)
            hashes = [hashlib.sha256(tokens[start : start + _HASHED].data) for start in range(0, len(tokens) or 1, _HASHED)]
            digest = hashlib.sha256("".join(each.hexdigest() for each in hashes).encode()).hexdigest()[:12]
            facts = TokenFileInfo("uint16" if dtype == np.uint16 else "uint32", **counts, digest=digest)
            (partial / FACTS).write_text(json.dumps(asdict(facts), indent=1))
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / FACTS).exists():  # unless another process was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise file_error("write", folder, error) from None


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def write_tokens(
    file: IO[bytes],
    documents: Iterable[Iterator[str]],
    tokenizer: Tokenizer,
    max_tokens: int | None,
    advance: Callable[[int], None],
) -> dict[str, int]:
    """Encode and write documents, up to `max_tokens` in total; return the numbers of tokens, bytes, words and documents.

    `advance` is called with the bytes of each part. If only the first `max_tokens` are wanted, little is encoded at once: a
    token is seldom longer than 8 characters.
    """
    counts = {"n_tokens": 0, "n_bytes": 0, "n_words": 0, "n_documents": 0}
    in_word = False  # a word may continue in the next part
    for part in encoded(tokenizer, documents, _AT_ONCE if max_tokens is None else min(_AT_ONCE, max(BLOCK, 8 * max_tokens))):
        ids, text, ends = part.ids, part.text, not part.right.text
        if max_tokens is not None and counts["n_tokens"] + len(ids) >= max_tokens:
            ids, ends = ids[: max_tokens - counts["n_tokens"]], False
            text = part.beginning(tokenizer, len(ids)) if len(ids) < len(part.ids) else text
        ids = np.append(ids, tokenizer.end_of_document) if ends else ids
        file.write(ids.astype(_dtype(tokenizer)).tobytes())
        words, size = text.split(), len(text.encode())
        counts["n_tokens"] += len(ids)
        counts["n_bytes"] += size
        counts["n_words"] += len(words) - bool(in_word and words and not text[0].isspace())
        counts["n_documents"] += not part.left.text
        in_word = not (ends or text[-1:].isspace())
        advance(size)
        if counts["n_tokens"] == max_tokens:
            break
    return counts


class Seam(NamedTuple):
    """A short text with which one part of a document ends and the next begins, and where in it their tokens are joined.

    Attributes:
        text: the text.
        ids: its tokens.
        before: the number of these before the seam.
        end: the number of characters that the tokens before the seam encode, with the whole of a last one.
    """

    text: str = ""
    ids: NDArray[np.int64] = np.zeros(0, np.int64)
    before: int = 0
    end: int = 0

    def joins(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> bool:
        """Whether both parts have the tokens of the short text around the seam, and from there to where it ends or begins."""
        last, beginning = self.ids[max(0, self.before - _SURE) :], self.ids[: self.before + _SURE]
        return np.array_equal(first[-len(last) :], last) and np.array_equal(second[: len(beginning)], beginning)


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

    def beginning(self, tokenizer: Tokenizer, n_tokens: int) -> str:
        """The text that the first tokens of the part encode, with the whole of a last character that they hold a part of."""
        _, ends, _ = tokenizer.places(self.around)
        return self.around[self.left.end : max(ends[: self.left.before + n_tokens], default=0)]


def encoded(tokenizer: Tokenizer, documents: Iterable[Iterator[str]], at_once: int) -> Iterator[Part]:
    """Encode documents, each given as blocks of text: a document has the tokens that the tokenizer gives its whole text.

    `at_once` is the number of characters to encode together, on all cores. Yields the parts of each document that has any text.
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
                yield part
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
            right = _seam(tokenizer, text[size - _SHARED : size])
            if right is None:
                size += max(_SHARED, size // 16)
                continue
            yield Part(text[:size], left, right)
            text, left, size = text[size - _SHARED :], right, BLOCK
    if text:
        yield Part(text, left, Seam())


def _seam(tokenizer: Tokenizer, text: str) -> Seam | None:
    """The place in a short text, in its middle if possible, at which the tokens of a longer one can be joined.

    It is the start of a word, because words are encoded independently. Within a word, BPE alone can be joined: its tokens are
    right if each two adjacent ones are. The place must not depend on where the text begins or ends: whatever groups characters
    by number, as digits by three, groups those of a text that begins one later in another way.
    """
    ids, ends, begins_word = tokenizer.places(text)
    shorter, ends_in_shorter, _ = tokenizer.places(text[1:-1])
    place_in_shorter = {end + 1: place for place, end in enumerate(ends_in_shorter, 1)}
    places = [
        (not begins_word[place], abs(ends[place - 1] - len(text) // 2), place)
        for place in range(_SURE, len(ids) - _SURE)
        if begins_word[place] or tokenizer.joins_within_words
    ]
    for _, _, place in sorted(places):
        other = place_in_shorter.get(ends[place - 1], 0)
        around, same = ids[place - _SURE : place + _SURE], shorter[max(0, other - _SURE) : other + _SURE]
        if np.array_equal(around, same):
            return Seam(text, ids, place, ends[place - 1])
    return None
