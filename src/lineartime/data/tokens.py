"""The tokens of a split: documents are encoded into a file for each text and tokenizer, which is read by memory map."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from lineartime.choices import ShardKind, Split
from lineartime.data.corpora import Corpus, LocalCorpus
from lineartime.data.readers import BLOCK, SHARES, SPLITS, SourceFile
from lineartime.data.shards import Piece, Shards, id_dtype, mapped, read_pieces, unmarked, write_ids
from lineartime.data.tokenizers import Part, Tokenizer, encoded, fingerprint
from lineartime.errors import ArgumentError, LineartimeError, reporting_file_errors
from lineartime.fields import Count, Matching
from lineartime.files import read_file, remove_abandoned, write_atomically
from lineartime.screen import Progress

_FORMAT = 6  # part of every file's name: increase it when the same input would give other tokens
_HASHED = 1 << 26  # tokens that are hashed together
PART = 1 << 20  # characters of a document that a core encodes at once


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a split as one sequence, with an end-of-document token after every document."""

    name: str  # in messages
    tokens: NDArray[np.integer[Any]] | Shards  # [n], in memory or on disk
    n_bytes: int  # of the encoded text; 0 if only its ids are known
    n_words: int = 0  # of that text, separated by white space
    digest: str = ""  # differs between streams of different tokens; empty for a stream that is not on disk
    n_documents: int = 1  # including a last one that is cut; 0 if only end tokens tell
    is_cut: bool = False  # whether a token limit ended the stream before the end of the split

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class TokenFileInfo:
    """Facts about a file of tokens, stored beside it."""

    n_tokens: Count
    n_bytes: Count
    n_words: Count
    n_documents: Count
    digest: Annotated[str, Matching("[0-9a-f]{12}", "12 hexadecimal digits")]


def token_stream(
    corpus: Corpus, split: Split, tokenizer: Tokenizer, cache: str | Path, max_tokens: int | None = None
) -> TokenStream:
    """The tokens of a split, or its first `max_tokens`, encoded only if the folder of token files, `cache`, does not hold them.

    Shards of token ids are read where they lie. Raises LineartimeError for text that cannot be read or is not UTF-8, ids beyond
    the vocabulary, a mixture of text and ids, and a cache that cannot be written or is damaged.
    """
    name = corpus.name if split == "all" else f"the {split} split of {corpus.name}"
    if parts := _parts_of_ids(corpus, split):
        shards = Shards(chain.from_iterable(_pieces(part, Path(cache)) for part in parts), tokenizer.vocab_size, max_tokens)
        is_cut = max_tokens is not None and len(shards) >= max_tokens
        return TokenStream(name, shards, 0, 0, shards.digest(), shards.n_documents, is_cut)
    key = "\n".join([str(_FORMAT), fingerprint(tokenizer), str(max_tokens), corpus.identity(split)])
    file = Path(cache) / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:20]}.tokens"
    about, dtype = file.with_suffix(".json"), id_dtype(tokenizer.vocab_size)
    if not (file.exists() and about.exists()):
        _write(file, about, dtype, corpus, split, tokenizer, max_tokens)
    facts = read_file(about, TokenFileInfo, "delete it to encode the text again")
    with reporting_file_errors("read", file):
        if file.stat().st_size != facts.n_tokens * dtype.itemsize:
            raise LineartimeError(f"{file} is damaged or cut off: delete it to encode the text again.")
        tokens = mapped(file, dtype)
    is_cut = max_tokens is not None and len(tokens) >= max_tokens
    return TokenStream(name, tokens, facts.n_bytes, facts.n_words, facts.digest, facts.n_documents, is_cut)


def _parts_of_ids(corpus: Corpus, split: Split) -> list[SourceFile]:
    """The parts of a split that hold token ids. Raises LineartimeError if others hold text."""
    parts = [each for source in corpus.sources if isinstance(source, LocalCorpus) for each in source.parts(split)]
    ids = [part for part in parts if part.has_ids]
    if ids and (len(ids) < len(parts) or not all(isinstance(source, LocalCorpus) for source in corpus.sources)):
        raise LineartimeError(f"{ids[0].path} holds token ids, and other files of {corpus.name} text: give files of one kind.")
    return ids


def _pieces(part: SourceFile, cache: Path) -> Iterator[Piece]:
    """The ids of a file, or of some splits of it, which are cut by position: a document ends there."""
    pieces = read_pieces(part, cache)
    if not part.splits:
        yield from pieces
        return
    firsts = np.cumsum([0, *(len(piece.ids) for piece in pieces)]).tolist()
    cuts = [round(share * firsts[-1]) for share in np.cumsum([0.0, *(SHARES[split] for split in SPLITS)])]
    for start, stop in (cuts[place : place + 2] for place, split in enumerate(SPLITS) if split in part.splits):
        for piece, first in zip(pieces, firsts, strict=False):
            if start < first + len(piece.ids) and first < stop:
                last = min(len(piece.ids), stop - first)
                yield piece.part(max(0, start - first), last, ends=first + last == stop < firsts[-1])


def write_shard(stream: TokenStream, tokenizer: Tokenizer, folder: Path, split: Split, kind: ShardKind) -> Path:
    """Write the tokens of a split as Megatron's pair of files, or as nanoGPT's file of uint16, whose name is returned.

    Raises ArgumentError for a vocabulary that uint16 does not hold.
    """

    def blocks() -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        for start in range(0, len(stream), PART):
            read = np.asarray(stream.tokens[start : start + PART], np.int64)
            yield unmarked(read), ((read < 0) | (read == tokenizer.end_of_document)).nonzero()[0] + 1

    is_short = id_dtype(tokenizer.vocab_size).itemsize == 2
    if kind == "nanogpt" and not is_short:
        found = f"is nanogpt, whose ids are uint16, but the tokenizer has {tokenizer.vocab_size:,} tokens"
        raise ArgumentError("format", f"{found}: write megatron, or give another tokenizer.")
    file = folder / ("val.bin" if (kind, split) == ("nanogpt", "validation") else f"{split}.bin")
    write_ids(file, "<u2" if is_short else "<i4", blocks(), index=kind == "megatron")
    return file


def describe_splits(corpus: Corpus, streams: Mapping[Split, TokenStream] | None = None) -> list[str]:
    """Describe each split of a corpus in a line: its source and, if it is encoded, its numbers of documents and tokens.

    This neither reads nor encodes the text.
    """
    lines = list(corpus.notes)
    for split in (*SPLITS, "all"):
        place = "the whole text" if split == "all" else corpus.describe(split)
        stream = (streams or {}).get(split)
        if stream is not None:
            first, count = "the first " if stream.is_cut else "", stream.n_documents
            documents = f"{count:,} {'document' if count == 1 else 'documents'}, " if count else ""
            place = f"{place}: {first}{documents}{len(stream):,} tokens"
        if place and (stream is not None or split != "all"):
            lines.append(f"{split + ':':<12}{place}")
    return lines


def _write(
    file: Path, about: Path, dtype: np.dtype[Any], corpus: Corpus, split: Split, tokenizer: Tokenizer, max_tokens: int | None
) -> None:
    """Encode into a temporary file and rename it, so that processes doing the same do not disturb each other."""
    partial = file.with_suffix(f".{uuid.uuid4().hex}.partial")
    with reporting_file_errors("write", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(file.parent, r"[0-9a-f]{20}\.[0-9a-f]{32}\.partial")  # other programs may use the same folder
        try:
            counts = np.zeros(4, np.int64)
            with Progress(f"encoding {corpus.name}, {split}") as progress, partial.open("wb") as opened:
                for part, ids in _beginning(tokenizer, corpus.documents(split), max_tokens):
                    opened.write(ids.astype(dtype).tobytes())
                    n_bytes = len(part.text.encode())
                    counts += (len(ids), n_bytes, len(part.text.split()), part.is_first)
                    progress.advance(n_bytes)
            tokens = mapped(partial, dtype)
            hashes = [hashlib.sha256(tokens[start : start + _HASHED].data) for start in range(0, len(tokens) or 1, _HASHED)]
            digest = hashlib.sha256("".join(each.hexdigest() for each in hashes).encode()).hexdigest()[:12]
            partial.replace(file)
            facts = dict(zip(("n_tokens", "n_bytes", "n_words", "n_documents"), counts.tolist(), strict=True))
            write_atomically(about, json.dumps({**facts, "digest": digest}, indent=1))
        finally:
            partial.unlink(missing_ok=True)


def _beginning(
    tokenizer: Tokenizer, documents: Iterable[Iterator[str]], max_tokens: int | None
) -> Iterator[tuple[Part, NDArray[np.int64]]]:
    """The parts of documents with their tokens and the ends of documents, up to `max_tokens` in total.

    If only these are wanted, little is encoded at once: a token is seldom longer than 8 characters.
    """
    size = PART if max_tokens is None else min(PART, max(BLOCK, 8 * max_tokens))
    left = max_tokens
    for part, own in encoded(tokenizer, documents, size):
        ids = np.append(own, tokenizer.end_of_document) if part.is_last else own
        if left is not None and left < len(ids):
            text = part.text if left == len(own) else tokenizer.beginning(part.text, left, not part.is_first)
            part, ids = part._replace(text=text), ids[:left]
        yield part, ids
        left = None if left is None else left - len(ids)
        if left == 0:
            return
