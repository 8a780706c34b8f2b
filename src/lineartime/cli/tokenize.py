"""`lineartime tokenize`: train a tokenizer on a text, by byte-level BPE."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from lineartime.choices import TEXT_COLUMN, VOCAB_SIZE
from lineartime.files import new_file
from lineartime.screen import SCREEN


@dataclass(frozen=True)
class TokenizeOptions:
    """The options of `lineartime tokenize`."""

    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Corpus name, file or folder, as for training; the default is the source of Python's standard library."""
    text_column: str = TEXT_COLUMN
    """Column of JSON, JSON lines, Parquet and data sets of the hub that holds the text."""
    include: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Read only those files of folders whose name, such as notes.md, matches a pattern, such as '*.md', or their path does."""
    exclude: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Leave out the files and folders in folders that match a pattern, such as '*.log' or 'drafts', by name or path."""
    vocab_size: int = VOCAB_SIZE
    """Vocabulary size, including the end-of-document and mask tokens."""
    max_bytes: int | None = None
    """Bytes of text to train on, from its beginning; the default is 2^30."""
    out: Path = Path("tokenizer.json")
    """File to write."""


def run(options: TokenizeOptions) -> None:
    """Train the tokenizer, write it, and print its size."""
    from lineartime.data import describe_splits, load_corpus, train_tokenizer
    from lineartime.data.train_tokenizer import check_tokenizer_options

    check_tokenizer_options(options.vocab_size, options.max_bytes)
    with new_file("out", options.out) as partial:
        corpus = load_corpus(options.data, options.text_column, options.include, options.exclude)
        for line in describe_splits(corpus):
            print(line, file=SCREEN)
        tokenizer = train_tokenizer(corpus, options.vocab_size, options.max_bytes)
        partial.write_text(tokenizer.to_json(), encoding="utf-8")
    print(f"{options.out}: BPE of {tokenizer.vocab_size:,} tokens, from {corpus.name}")
    if tokenizer.vocab_size < options.vocab_size:
        found = f"The tokenizer has {tokenizer.vocab_size:,} tokens instead of {options.vocab_size:,}, because the text is too "
        print(f"{found}short for more: use it as it is, or give more text (--data, --max-bytes).", file=SCREEN)
