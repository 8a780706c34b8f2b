"""Training tokenizers on the training split of a corpus: byte-level BPE, or Unigram with byte fallback."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from lineartime.choices import VOCAB_SIZE, TokenizerKind
from lineartime.data.corpora import Corpus, no_text
from lineartime.data.progress import Progress
from lineartime.data.tokenizers import (
    FRAME,
    MASK_TEXT,
    JsonTokenizer,
    Tokenizer,
    is_ready_name,
    named_tokenizer,
    read_tokenizer,
)
from lineartime.errors import ArgumentError, first_line, require_packages
from lineartime.fields import AtLeastOne, Between, check_type
from lineartime.files import is_folder, is_there, write_file

_FORMAT = 4  # part of every cached file's name: increase it when the same text would give another tokenizer
_SPECIAL = ["<|endoftext|>", MASK_TEXT, *FRAME]
_UNKNOWN = "<unk>"  # Unigram requires one, but byte fallback never uses it
# Unigram would encode text that looks like the name of a special token or of a byte as that token; splitting it prevents this.
_LIKE_A_NAME = (
    "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in [*_SPECIAL, _UNKNOWN]) + "|<(?=0x[0-9A-F]{2}>)"
)
_LONG_SPACE = re.compile(r"\s{500}")
_LONG_RUN = re.compile(r"[^\W\d_]{500}|\d{500}|(?:[^\w\s]|_){500}|\s{500}")
"""Characters that would be one word, as DNA is. Merging pairs in a word takes a time that grows with its length squared."""
_MIN_VOCABULARY: dict[TokenizerKind, int] = {"bpe": 256 + len(_SPECIAL), "unigram": 256 + len(_SPECIAL) + 1 + 256}
_MAX_VOCABULARY = 2**24
"""The largest vocabulary: above the largest in use, and small enough for the library that trains it."""

TRAINING_BYTES: dict[TokenizerKind, int] = {"bpe": 1 << 30, "unigram": 1 << 26}
"""Bytes of text to learn from. Unigram needs many times as much memory."""


def train_tokenizer(corpus: Corpus, kind: TokenizerKind, vocab_size: int, max_bytes: int | None = None) -> JsonTokenizer:
    """Train a tokenizer on the beginning of the training split, on all cores.

    BPE works on bytes, and decoding restores every text exactly. Unigram falls back to bytes where it has no piece; decoding
    restores every text, except that U+2581 becomes a space. `vocab_size` includes the end of a document, the mask, [CLS] and
    [SEP]; a short text gives fewer tokens. `max_bytes` of text are learned from, by default `TRAINING_BYTES`.

    Raises LineartimeError for an unknown kind, a vocabulary too small for all bytes or too large, or a corpus without text.
    """
    check_tokenizer_options(kind, vocab_size, max_bytes)
    require_packages("tokenizers", extra="tokenizers", purpose="Training a tokenizer")
    import tokenizers

    with Progress(f"training a tokenizer on {corpus.name}") as progress:
        texts = _texts(corpus, TRAINING_BYTES[kind] if max_bytes is None else max_bytes, progress)
        first = next(texts, None)
        if first is None:
            raise no_text(f"the train split of {corpus.name}")
        train = _train_bpe if kind == "bpe" else _train_unigram
        definition = train(tokenizers, chain([first], texts), vocab_size)
    return JsonTokenizer(definition, f"{kind} of {corpus.name}")


def check_tokenizer_options(kind: TokenizerKind, vocab_size: int, max_bytes: int | None) -> None:
    """Raise ArgumentError for an option that `train_tokenizer` does not take; a command calls this before it reads the text."""
    check_type("kind", kind, TokenizerKind)
    check_type("max_bytes", max_bytes, AtLeastOne | None)
    check_type("vocab_size", vocab_size, Annotated[int, Between(_MIN_VOCABULARY[kind], _MAX_VOCABULARY)])


def _texts(corpus: Corpus, limit: int, progress: Progress) -> Iterator[str]:
    """The training split in blocks of whole lines, or parts of overlong lines and words, up to `limit` bytes."""
    for text in chain.from_iterable(map(_whole_lines, corpus.documents("train"))):
        size = len(text.encode())
        if size > limit:
            text = text.encode()[:limit].decode(errors="ignore") or text[:1]
        # The pattern alone would take a third of the time of training.
        has_long_run = max(map(len, text.split()), default=0) >= 500 or bool(_LONG_SPACE.search(text))
        cuts = [0, *(run.end() for run in _LONG_RUN.finditer(text if has_long_run else "")), len(text)]
        yield from (text[start:stop] for start, stop in pairwise(cuts))
        progress.advance(size)
        limit -= size
        if limit <= 0:
            return


def _whole_lines(blocks: Iterator[str]) -> Iterator[str]:
    """Cut a text into blocks at ends of lines; a line longer than a block is cut at the end of the block."""
    rest = ""
    for block in chain(blocks, [""]):
        text = rest + block
        cut = (text.rfind("\n") + 1 if block else 0) or len(text)
        rest = text[cut:]
        if text:
            yield text[:cut]


def _train_bpe(tokenizers: Any, texts: Iterator[str], vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _train_unigram(tokenizers: Any, texts: Iterator[str], vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    split = tokenizers.pre_tokenizers
    names = split.Split(tokenizers.Regex(_LIKE_A_NAME), "isolated")
    lines = split.Split("\n", "isolated")
    tokenizer.pre_tokenizer = split.Sequence([names, lines, split.Metaspace(prepend_scheme="never")])
    decoders = tokenizers.decoders
    # Spaces last: where no piece has one, they are made of bytes, too.
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("\u2581", " ")])
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=[*_SPECIAL, _UNKNOWN],
        initial_alphabet=["\u2581"],  # also for text without a space
        unk_token=_UNKNOWN,
        show_progress=False,
    )
    try:
        tokenizer.train_from_iterator(texts, trainer)
    except Exception as error:
        if "vocabulary" not in str(error):
            raise
        problem = f"is {vocab_size:,}, too few for the characters of this text ({first_line(error)}): give more, or train bpe."
        raise ArgumentError("vocab_size", problem) from None
    definition = json.loads(tokenizer.to_str())
    # The library falls back to bytes if there are pieces with these names, but its trainer does not create them.
    lowest = min(score for _, score in definition["model"]["vocab"])
    definition["model"]["vocab"] += [[f"<0x{byte:02X}>", lowest - 10] for byte in range(256)]
    definition["model"]["byte_fallback"] = True
    return json.dumps(definition, ensure_ascii=False)


def is_tokenizer_name(choice: str) -> bool:
    """Whether `tokenizer_for` reads this as a name, not as a path."""
    return is_ready_name(choice) or size_to_train(choice) is not None


def names_folder(choice: str | None) -> bool:
    """Whether a tokenizer is that of a folder, for instance of a run. A folder with the name of a tokenizer is not meant."""
    return choice is not None and not is_tokenizer_name(choice) and is_folder(choice)


def size_to_train(choice: str) -> int | None:
    """The number of tokens in the name of a tokenizer to train, such as bpe-32000; None for other names and for paths."""
    found = re.fullmatch(r"(?:bpe|unigram)-(\d{1,20})", choice)
    return int(found[1]) if found else None


def ready_tokenizer(choice: str | Path | None) -> Tokenizer:
    """Return a tokenizer that need not be trained: as `tokenizer_for`, which raises the same errors."""
    name = "bytes" if choice is None else str(choice)
    if not name:
        raise ArgumentError("tokenizer", "is empty: give a name or a path, or leave it out.")
    if not is_tokenizer_name(name) and not is_there(name):
        raise ArgumentError(
            "tokenizer",
            f"is {choice}, which is neither a file nor a name: use bytes, bpe-{VOCAB_SIZE}, unigram-{VOCAB_SIZE}, "
            "hub:NAME or the path of a tokenizer.json.",
        )
    return named_tokenizer(name)


def tokenizer_for(choice: str | Path | None, corpus: Corpus, cache: Path) -> Tokenizer:
    """Return the tokenizer for a name or a path: "bytes" or None, a file or a checkpoint folder, or one on the hub (hub:gpt2).

    "bpe-32000" or "unigram-32000", with the size of the vocabulary, is trained on the corpus the first time and kept in the
    cache, a folder. Raises LineartimeError for any other choice, and for errors in training or reading the tokenizer.
    """
    vocab_size = size_to_train(choice) if isinstance(choice, str) else None
    if vocab_size is None:
        return ready_tokenizer(choice)
    kind: TokenizerKind = "bpe" if str(choice).startswith("bpe") else "unigram"
    if not _MIN_VOCABULARY[kind] <= vocab_size <= _MAX_VOCABULARY:
        sizes = f"from {_MIN_VOCABULARY[kind]:,} to {_MAX_VOCABULARY:,} tokens"
        raise ArgumentError("tokenizer", f"is {choice}, but {kind} tokenizers have {sizes}.")
    key = "\n".join([str(_FORMAT), str(choice), str(TRAINING_BYTES[kind]), corpus.identity("train")])
    file = cache / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:20]}.tokenizer.json"
    if not file.exists():
        write_file(file, train_tokenizer(corpus, kind, vocab_size).to_json())
    return read_tokenizer(file)
