"""Token files: a split of a corpus is encoded once into shards on disk, which are memory-mapped and may exceed memory.

A folder of the cache is written under a temporary name and renamed when it is complete. It holds

    tokens-00000.bin, ...   uint16 or uint32, 2^26 tokens in each but the last
    facts.json              the counts, and the SHA-256 of each file

The digest of a file is checked when the file is opened, unless it is older than facts.json, which is touched after each check.

Token files of other trainers would be read by functions like `_open`: one for each format, from a path to a `TokenStream`.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lineartime.choices import Split
from lineartime.data.corpora import Corpus
from lineartime.data.encode import FACTS, EncodedTextInfo, Integers, ShardWriter
from lineartime.data.progress import Progress
from lineartime.data.readers import SPLITS
from lineartime.data.tokenizers import Tokenizer, fingerprint
from lineartime.errors import LineartimeError, file_error
from lineartime.files import read_file, remove_abandoned, sha256

_FORMAT = 4  # part of every folder's name: increase it when the same input would give other tokens
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
        n_documents: the number of documents, including a last one that is cut; None if an earlier version encoded the tokens.
        is_cut: whether a token limit ended the stream before the end of the split.
    """

    name: str
    tokens: Integers | Shards
    n_bytes: int
    n_words: int = 0
    digest: str = ""
    n_documents: int | None = None
    is_cut: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


def joined(corpus: Corpus, split: Split, streams: Sequence[TokenStream]) -> TokenStream:
    """The tokens of a split of a corpus, from those of its sources, one after another."""
    parts = [stream.tokens for stream in streams]
    documents = [stream.n_documents for stream in streams if stream.n_documents is not None]
    return TokenStream(
        f"the {split} split of {corpus.name}",
        Shards([shard for tokens in parts for shard in (tokens.shards if isinstance(tokens, Shards) else [tokens])]),
        sum(stream.n_bytes for stream in streams),
        sum(stream.n_words for stream in streams),
        hashlib.sha256("".join(stream.digest for stream in streams).encode()).hexdigest()[:12],
        sum(documents) if len(documents) == len(streams) else None,
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
    documents = "" if count is None else "1 document, " if count == 1 else f"{count:,} documents, "
    return f": {first}{documents}{len(stream):,} tokens"


def _key(identity: str, tokenizer: Tokenizer, max_tokens: int | None) -> str:
    """A name for the tokens, which changes with the tokenizer, the text and the limit."""
    # Of limited tokens, earlier versions counted the bytes and words of the decoded text.
    limit = "None" if max_tokens is None else f"{max_tokens} of the original text"
    parts = [str(_FORMAT), fingerprint(tokenizer), limit, identity]
    return hashlib.sha256(os.fsencode("\n".join(parts))).hexdigest()[:20]


def _open(folder: Path, name: str) -> TokenStream:
    facts = read_file(folder / FACTS, EncodedTextInfo, f"delete the folder {folder} to encode the text again")
    try:
        _verify(folder, facts.sha256)
        dtype = np.dtype(facts.dtype)
        files = [folder / file for file in sorted(facts.sha256)]
        shards = [np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype) for file in files]
    except ValueError:  # a shard that ends within a token, with a matching digest
        raise _damaged(folder, FACTS) from None
    except OSError as error:
        raise file_error("read", folder, error) from None
    if not shards or sum(map(len, shards)) != facts.n_tokens:
        raise _damaged(folder, FACTS)
    written = "".join(facts.sha256[file] for file in sorted(facts.sha256))
    identity = hashlib.sha256(written.encode()).hexdigest()[:12]
    return TokenStream(name, Shards(shards), facts.n_bytes, facts.n_words, identity, facts.n_documents)


def _verify(folder: Path, digests: dict[str, str]) -> None:
    """Raise LineartimeError for a file that differs from what was written."""
    checked, changed = (folder / FACTS).stat().st_mtime_ns, False
    for file, written in digests.items():
        if not (folder / file).is_file():
            raise _damaged(folder, file)
        if (folder / file).stat().st_mtime_ns >= checked:
            with Progress(f"checking {file}"):
                if sha256(folder / file) != written:
                    raise _damaged(folder, file)
            changed = True
    if changed:
        with suppress(OSError):  # in a cache that cannot be written, the file is checked again next time
            (folder / FACTS).touch()


def _damaged(folder: Path, file: str) -> LineartimeError:
    return LineartimeError(f"The token file {folder / file} is damaged: delete the folder {folder} to encode the text again.")


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
            with Progress(f"encoding {corpus.name}, {split}") as progress, ShardWriter(partial, tokenizer) as writer:
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
