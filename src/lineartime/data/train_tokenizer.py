"""Training byte-level BPE tokenizers on the training split of a corpus, and tokenizers by their names."""

import hashlib
import os
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

from lineartime.choices import VOCAB_SIZE
from lineartime.data.corpora import Corpus, no_text
from lineartime.data.readers import BLOCK
from lineartime.data.tokenizers import (
    FRAME,
    MASK_TEXT,
    JsonTokenizer,
    Tokenizer,
    is_ready_name,
    named_tokenizer,
    read_tokenizer,
)
from lineartime.data.tokens import parts
from lineartime.errors import ArgumentError, require_packages
from lineartime.fields import AtLeastOne, Between, check_type
from lineartime.files import is_there, write_file
from lineartime.screen import Progress

_FORMAT = 5  # part of every cached file's name: increase it when the same text would give another tokenizer
_SPECIAL = ["<|endoftext|>", MASK_TEXT, *FRAME]
_LONG_SPACE = re.compile(r"\s{500}")
_LONG_RUN = re.compile(r"[^\W\d_]{500}|\d{500}|(?:[^\w\s]|_){500}|\s{500}")
"""Characters that would be one word, as DNA is. Merging pairs in a word takes a time that grows with its length squared."""
_SMALLEST, _LARGEST = 256 + len(_SPECIAL), 2**24
"""The sizes of a vocabulary: one for all bytes, and one above the largest in use, which the library can train."""
_TRAINING_BYTES = 1 << 30
"""The default of `max_bytes`."""


def train_tokenizer(corpus: Corpus, vocab_size: int, max_bytes: int | None = None) -> JsonTokenizer:
    """Train a tokenizer on the beginning of the training split, by byte-level BPE on all cores.

    Decoding restores every text exactly. `vocab_size` includes the end of a document, the mask, [CLS] and [SEP]; a short text
    gives fewer tokens. `max_bytes` of text are learned from, by default 2^30.

    Raises LineartimeError for a vocabulary too small for all bytes or too large, or a corpus without text.
    """
    check_tokenizer_options(vocab_size, max_bytes)
    require_packages("tokenizers", extra="tokenizers", purpose="Training a tokenizer")
    import tokenizers

    with Progress(f"training a tokenizer on {corpus.name}") as progress:
        texts = _texts(corpus, _TRAINING_BYTES if max_bytes is None else max_bytes, progress)
        first = next(texts, None)
        if first is None:
            raise no_text(f"the train split of {corpus.name}")
        definition = _train_bpe(tokenizers, chain([first], texts), vocab_size)
    return JsonTokenizer(definition, f"bpe of {corpus.name}")


def check_tokenizer_options(vocab_size: int, max_bytes: int | None) -> None:
    """Raise ArgumentError for an option that `train_tokenizer` does not take; a command calls this before it reads the text."""
    check_type("max_bytes", max_bytes, AtLeastOne | None)
    check_type("vocab_size", vocab_size, Annotated[int, Between(_SMALLEST, _LARGEST)])


def _texts(corpus: Corpus, limit: int, progress: Progress) -> Iterator[str]:
    """The training split in blocks that end between words, or in parts of overlong words, up to `limit` bytes."""
    for block in chain.from_iterable(parts(document, BLOCK) for document in corpus.documents("train")):
        text, size = block.text, len(block.text.encode())
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


def is_tokenizer_name(choice: str) -> bool:
    """Whether `tokenizer_for` reads this as a name, not as a path."""
    return is_ready_name(choice) or size_to_train(choice) is not None


def size_to_train(choice: str) -> int | None:
    """The number of tokens in the name of a tokenizer to train, such as bpe-32000; None for other names and for paths."""
    found = re.fullmatch(r"(?:bpe|unigram)-(\d{1,20})", choice)  # earlier versions trained Unigram: their runs go on
    return int(found[1]) if found else None


def tokenizer_for(choice: str | Path | None, corpus: Corpus, cache: Path) -> Tokenizer:
    """Return the tokenizer for a name or a path: "bytes" or None, a file or a checkpoint folder, or one on the hub (hub:gpt2).

    "bpe-32000", with the size of the vocabulary, is trained on the corpus the first time and kept in the cache, a folder.
    Raises LineartimeError for any other choice, and for errors in training or reading the tokenizer.
    """
    name = "bytes" if choice is None else str(choice)
    vocab_size = size_to_train(name) if not isinstance(choice, Path) else None
    if not name:
        raise ArgumentError("tokenizer", "is empty: give a name or a path, or leave it out.")
    if vocab_size is None and not is_ready_name(name) and not is_there(name):
        known = f"use bytes, bpe-{VOCAB_SIZE}, hub:NAME or the path of a tokenizer.json."
        raise ArgumentError("tokenizer", f"is {choice}, which is neither a file nor a name: {known}")
    if vocab_size is None:
        return named_tokenizer(name)
    if not name.startswith("bpe"):
        others = "train another one by the tokenizers library, and give the path of its tokenizer.json"
        raise ArgumentError("tokenizer", f"is {name}, but only BPE is trained: use bpe-{vocab_size}, or {others}.")
    if not _SMALLEST <= vocab_size <= _LARGEST:
        raise ArgumentError("tokenizer", f"is {name}, but bpe tokenizers have from {_SMALLEST:,} to {_LARGEST:,} tokens.")
    key = "\n".join([str(_FORMAT), name, str(_TRAINING_BYTES), corpus.identity("train")])
    file = cache / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:20]}.tokenizer.json"
    if not file.exists():
        write_file(file, train_tokenizer(corpus, vocab_size).to_json())
    return read_tokenizer(file)
