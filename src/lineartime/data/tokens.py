"""The tokens of a split: documents are encoded into files, a folder for each text and tokenizer, and read by memory map."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from lineartime.data.tokenizers import Seam, Tokenizer, fingerprint
from lineartime.errors import LineartimeError, file_error
from lineartime.fields import Count, Digest, Matching
from lineartime.files import read_file, remove_abandoned

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
    """Facts about an encoded text, stored in facts.json."""

    dtype: Literal["uint16", "uint32"]
    n_tokens: Count
    n_bytes: Count
    n_words: Count
    n_documents: Count
    sha256: dict[ShardName, Digest]


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
        """Encode and write documents, up to `max_tokens` in total, and call `advance` with the bytes of each part.

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
                advance(self._count(text))
                self._write(ids.astype(self._dtype))
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

    def _count(self, text: str) -> int:
        """Count bytes, which are returned, and words; a word may continue in the next text of the document."""
        size = len(text.encode())
        self._n_bytes += size
        words = len(text.split())
        self._n_words += words - (self._in_word and words > 0 and not text[0].isspace())
        if text:
            self._in_word = not text[-1].isspace()
        return size

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


_FORMAT = 5  # part of every folder's name: increase it when the same input would give other tokens
_PARTIAL = r"[0-9a-f]{20}\.[0-9a-f]{32}\.partial"


class Shards:
    """The tokens of several files as one sequence; slices may cross the ends of files."""

    def __init__(self, shards: list[Integers]) -> None:
        self.shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, places: slice) -> Integers:
        start, stop, step = places.indices(len(self))
        if step != 1:
            raise ValueError(f"The step of a slice is {step}, but must be 1.")
        found = []
        for index in range(int(np.searchsorted(self._ends, start, side="right")), len(self.shards)):
            before = int(self._ends[index]) - len(self.shards[index])
            if before >= stop:
                break
            found.append(self.shards[index][max(0, start - before) : stop - before])
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else self.shards[0][:0]


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
    tokens: Integers | Shards
    n_bytes: int
    n_words: int = 0
    digest: str = ""
    n_documents: int = 1
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


def joined(corpus: Corpus, split: Split, streams: Sequence[TokenStream]) -> TokenStream:
    """The tokens of a split of a corpus, from those of its sources, one after another."""
    parts = [stream.tokens for stream in streams]
    return TokenStream(
        f"the {split} split of {corpus.name}",
        Shards([shard for tokens in parts for shard in (tokens.shards if isinstance(tokens, Shards) else [tokens])]),
        sum(stream.n_bytes for stream in streams),
        sum(stream.n_words for stream in streams),
        hashlib.sha256("".join(stream.digest for stream in streams).encode()).hexdigest()[:12],
        sum(stream.n_documents for stream in streams),
        any(stream.is_cut for stream in streams),
    )


def token_stream(
    corpus: Corpus, split: Split, tokenizer: Tokenizer, cache: str | Path, max_tokens: int | None = None
) -> TokenStream:
    """The tokens of a split, or its first `max_tokens`, encoded only if the folder of token files, `cache`, does not hold them.

    Raises LineartimeError for text that cannot be read or is not UTF-8, and for a cache that cannot be written or is damaged.
    """
    folder = Path(cache) / _key(corpus.identity(split), tokenizer, max_tokens)
    name = corpus.name if split == "all" else f"the {split} split of {corpus.name}"
    if not (folder / FACTS).exists():
        _write(folder, corpus, split, tokenizer, max_tokens)
    stream = _open(folder, name)
    return replace(stream, is_cut=max_tokens is not None and len(stream) >= max_tokens)


def describe_splits(corpus: Corpus, streams: Mapping[Split, TokenStream] | None = None) -> list[str]:
    """Describe each split of a corpus in a line: its source and, if it is encoded, its numbers of documents and tokens.

    This neither reads nor encodes the text.
    """
    streams = streams or {}
    lines = list(corpus.notes)
    for split in SPLITS:
        if place := corpus.describe(split):
            lines.append(f"{split + ':':<12}{place}{_counts(streams.get(split))}")
    if "all" in streams:
        lines.append(f"{'all:':<12}the whole text{_counts(streams['all'])}")
    return lines


def _counts(stream: TokenStream | None) -> str:
    if stream is None:
        return ""
    first = "the first " if stream.is_cut else ""
    count = stream.n_documents
    return f": {first}{count:,} {'document' if count == 1 else 'documents'}, {len(stream):,} tokens"


def _key(identity: str, tokenizer: Tokenizer, max_tokens: int | None) -> str:
    """A name for the tokens, which changes with the tokenizer, the text and the limit."""
    parts = [str(_FORMAT), fingerprint(tokenizer), str(max_tokens), identity]
    return hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()[:20]


def _open(folder: Path, name: str) -> TokenStream:
    facts = read_file(folder / FACTS, EncodedTextInfo, f"delete the folder {folder} to encode the text again")
    try:
        dtype = np.dtype(facts.dtype)
        files = [folder / file for file in sorted(facts.sha256)]
        shards = [np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype) for file in files]
    except (ValueError, FileNotFoundError):  # a shard that ends within a token, or is gone
        shards = []
    except OSError as error:
        raise file_error("read", folder, error) from None
    if not shards or sum(map(len, shards)) != facts.n_tokens:
        found = f"The token files in {folder} are damaged or cut off"
        raise LineartimeError(f"{found}: delete the folder to encode the text again.")
    written = "".join(facts.sha256[file] for file in sorted(facts.sha256))
    identity = hashlib.sha256(written.encode()).hexdigest()[:12]
    return TokenStream(name, Shards(shards), facts.n_bytes, facts.n_words, identity, facts.n_documents)


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
            total = corpus.size(split) if max_tokens is None else None
            with Progress(f"encoding {corpus.name}, {split}", total) as progress, ShardWriter(partial, tokenizer) as writer:
                writer.add(corpus.documents(split), max_tokens, progress.advance)
            writer.finish()
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / FACTS).exists():  # unless another process was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise file_error("write", folder, error) from None
