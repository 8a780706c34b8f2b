"""`lineartime tokenize`: a tokenizer of one's own."""

from dataclasses import dataclass
from pathlib import Path

from lineartime.data.corpora import load_corpus
from lineartime.data.train_tokenizer import VOCAB_SIZE, Kind, train_tokenizer
from lineartime.errors import LineartimeError, cannot


@dataclass(frozen=True)
class TokenizeConfig:
    """Train a tokenizer on the training split of a text; `lineartime train --tokenizer` takes the file."""

    data: str | None = None
    """Name of a corpus, or a file or folder, as for training; the default is the source of Python's standard library."""
    kind: Kind = "bpe"
    """bpe: byte-level BPE, which gives back every text exactly; unigram: Unigram with byte fallback."""
    vocab_size: int = VOCAB_SIZE
    """Tokens, among them the end of a document and the mask."""
    max_bytes: int | None = None
    """Bytes of text to learn from; the default is 2^30 for bpe and 2^26 for unigram, which needs much memory."""
    out: Path = Path("tokenizer.json")
    """File to write."""


def run_tokenize(config: TokenizeConfig) -> None:
    """Train and write the tokenizer, and say what became of it."""
    if config.out.exists():
        raise LineartimeError(f"--out {config.out} exists already: delete it, or choose another file.")
    if config.max_bytes is not None and config.max_bytes < 1:
        raise LineartimeError(f"--max-bytes is {config.max_bytes}, but must be at least 1.")
    corpus = load_corpus(config.data)
    tokenizer = train_tokenizer(corpus, config.kind, config.vocab_size, config.max_bytes)
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        config.out.write_text(tokenizer.to_json(), encoding="utf-8")
    except OSError as error:
        raise cannot("write", config.out, error) from None
    print(f"{config.out}: {config.kind} of {tokenizer.vocab_size:,} tokens, from {corpus.name}")
    if tokenizer.vocab_size < config.vocab_size:
        print(f"There was too little text for {config.vocab_size:,} tokens.")
