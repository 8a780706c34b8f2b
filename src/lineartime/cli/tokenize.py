"""`lineartime tokenize`: train a tokenizer on a text."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from lineartime.choices import MAX_EXPANSION, TEXT_COLUMN, VOCAB_SIZE, TokenizerKind
from lineartime.errors import ArgumentError, reporting
from lineartime.files import check_writable, write_atomically
from lineartime.screen import SCREEN


@dataclass(frozen=True)
class Options:
    """Train a tokenizer on the training split of a text; `lineartime train --tokenizer` takes the file."""

    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Corpus name, file or folder, as for training; the default is the source of Python's standard library."""
    text_column: str = TEXT_COLUMN
    """Column of JSON, JSON lines, Parquet and data sets of the hub that holds the text."""
    max_expansion: int = MAX_EXPANSION
    """Maximum bytes of text per byte of a compressed file: a small file that becomes huge is refused."""
    kind: TokenizerKind = "bpe"
    """bpe: byte-level BPE, which restores every text exactly; unigram: Unigram with byte fallback."""
    vocab_size: int = VOCAB_SIZE
    """Vocabulary size, including the end-of-document and mask tokens."""
    max_bytes: int | None = None
    """Bytes of text to train on; the default is 2^30 for bpe, and 2^26 for unigram, which needs much memory."""
    out: Path = Path("tokenizer.json")
    """File to write."""


def run(options: Options) -> None:
    """Train the tokenizer, write it, and print its size."""
    from lineartime.data import describe_splits, load_corpus, train_tokenizer
    from lineartime.ops.checks import check_positive

    if options.out.exists():
        raise ArgumentError("out", f"is {options.out}, which exists already: delete it, or choose another file.")
    if options.max_bytes is not None:
        check_positive(max_bytes=options.max_bytes)
    corpus = load_corpus(options.data, options.text_column, options.max_expansion)
    for line in describe_splits(corpus):
        print(line, file=SCREEN)
    with reporting("write", options.out):
        check_writable(options.out)
    tokenizer = train_tokenizer(corpus, options.kind, options.vocab_size, options.max_bytes)
    with reporting("write", options.out):
        write_atomically(options.out, tokenizer.to_json())
    print(f"{options.out}: {options.kind} of {tokenizer.vocab_size:,} tokens, from {corpus.name}")
    if tokenizer.vocab_size < options.vocab_size:
        print(
            f"The tokenizer has {tokenizer.vocab_size:,} tokens instead of {options.vocab_size:,}, because the text is too "
            "short for more: use it as it is, or give more text (--data, --max-bytes).",
            file=SCREEN,
        )
