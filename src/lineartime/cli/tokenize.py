"""`lineartime tokenize`: train a tokenizer on a text, by byte-level BPE, or write the text as token ids for other programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from lineartime.choices import TEXT_COLUMN, VOCAB_SIZE, RawIds, ShardKind, Split
from lineartime.errors import ArgumentError
from lineartime.files import TOKENIZER_FILE, new_file, new_folder
from lineartime.host import cache_folder
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
    raw_ids: RawIds | None = None
    """Type of the token ids in files that do not state it."""
    format: Literal["tokenizer"] | ShardKind = "tokenizer"
    """tokenizer: train one; megatron (.bin and .idx), nanogpt (.bin of uint16): the text as token ids, split by split."""
    tokenizer: str | None = None
    """For token ids: bytes, a file, a run, hub:NAME, or bpe-32000 (or another size) to train one; the default is bytes."""
    vocab_size: int = VOCAB_SIZE
    """Vocabulary size of a trained tokenizer, including the end-of-document and mask tokens."""
    max_bytes: int | None = None
    """Bytes of text to train on, from its beginning; the default is 2^30."""
    out: Path | None = None
    """File to write, by default tokenizer.json; for token ids, the folder, by default tokens."""


def run(options: TokenizeOptions) -> None:
    """Train the tokenizer and write it, or write the text as token ids, and print how many there are."""
    from lineartime.data import describe_splits, load_corpus, train_tokenizer
    from lineartime.data.tokenizers import check_tokenizer_options

    reading = (options.data, options.text_column, options.include, options.exclude, options.raw_ids)
    if options.format != "tokenizer":
        _write_ids(options, options.format, reading)
        return
    if options.tokenizer is not None:
        raise ArgumentError("tokenizer", f"is {options.tokenizer}, but one is trained: give a `format` for token ids.")
    check_tokenizer_options(options.vocab_size, options.max_bytes)
    with new_file("out", out := options.out or Path("tokenizer.json")) as partial:
        corpus = load_corpus(*reading)
        for line in describe_splits(corpus):
            print(line, file=SCREEN)
        tokenizer = train_tokenizer(corpus, options.vocab_size, options.max_bytes)
        partial.write_text(tokenizer.to_json(), encoding="utf-8")
    print(f"{out}: BPE of {tokenizer.vocab_size:,} tokens, from {corpus.name}")
    if tokenizer.vocab_size < options.vocab_size:
        found = f"The tokenizer has {tokenizer.vocab_size:,} tokens instead of {options.vocab_size:,}, because the text is too "
        print(f"{found}short for more: use it as it is, or give more text (--data, --max-bytes).", file=SCREEN)


def _write_ids(options: TokenizeOptions, kind: ShardKind, reading: tuple[Any, ...]) -> None:
    """Write every split of the text as token ids, and the tokenizer beside them."""
    from lineartime.data import describe_splits, load_corpus, token_stream
    from lineartime.data.readers import SPLITS
    from lineartime.data.tokens import write_shard
    from lineartime.training.setup import choose_tokenizer

    if options.vocab_size != VOCAB_SIZE or options.max_bytes is not None:
        name = "max_bytes" if options.vocab_size == VOCAB_SIZE else "vocab_size"
        raise ArgumentError(name, f"is for a tokenizer alone: leave it out, and give `tokenizer`, such as bpe-{VOCAB_SIZE}.")
    with new_folder("out", out := options.out or Path("tokens")) as folder:
        corpus, cache = load_corpus(*reading), cache_folder()
        tokenizer = choose_tokenizer(options.tokenizer, corpus, cache)
        splits: list[Split] = [split for split in SPLITS if corpus.describe(split)]
        streams = {split: token_stream(corpus, split, tokenizer, cache) for split in splits}
        files = [write_shard(stream, tokenizer, folder, split, kind).name for split, stream in streams.items()]
        (folder / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    for line in describe_splits(corpus, streams):
        print(line, file=SCREEN)
    print(f"{out}: {', '.join(files)} and {TOKENIZER_FILE}, as {kind} reads them")
