"""Tokenizers of one's own: byte-level BPE, or Unigram with byte fallback, trained on the training split of a corpus."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lineartime.data.corpora import Corpus
from lineartime.data.progress import Progress
from lineartime.data.tokenizers import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer, whole_lines
from lineartime.errors import LineartimeError, cannot, missing_extra

Kind = Literal["bpe", "unigram"]
VOCAB_SIZE = 32_000
"""What makes the parameter tables of the paper come out."""

_FORMAT = 1  # part of every cached file's name: raise it when the same text would give another tokenizer
_SPECIAL = ["<|endoftext|>", "[MASK]"]
_UNKNOWN = "<unk>"  # Unigram has to have one, but byte fallback never leaves anything to it
# Unigram would take a text that looks like the name of such a token, or of a byte's, for that token, if it saw it whole.
_LIKE_A_NAME = (
    "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in [*_SPECIAL, _UNKNOWN]) + "|<(?=0x[0-9A-F]{2}>)"
)
_SMALLEST: dict[Kind, int] = {"bpe": 256 + len(_SPECIAL), "unigram": 256 + len(_SPECIAL) + 1 + 256}

TRAINING_BYTES: dict[Kind, int] = {"bpe": 1 << 30, "unigram": 1 << 26}
"""How much text is enough. Unigram keeps all of it in memory, many times over."""


def train_tokenizer(corpus: Corpus, kind: Kind, vocab_size: int, max_bytes: int | None = None) -> JsonTokenizer:
    """Train a tokenizer on the beginning of the training split, on all cores.

    BPE takes every text apart into bytes and gives it back exactly. Unigram writes in bytes what it has no piece for, and
    gives back every text, too, but for U+2581, which becomes a space.

    Args:
        corpus: the text.
        kind: "bpe" or "unigram".
        vocab_size: all tokens, the end of a document and the mask among them. Little text gives fewer.
        max_bytes: of text to learn from; the default is `TRAINING_BYTES`.

    Raises:
        LineartimeError: for a vocabulary that has no room for all bytes, or no text.
    """
    if vocab_size < _SMALLEST[kind]:
        raise LineartimeError(f"--vocab-size is {vocab_size}, but {kind} needs at least {_SMALLEST[kind]}.")
    try:
        import tokenizers
    except ImportError:
        raise missing_extra("tokenizers", "data", "Training a tokenizer") from None
    with Progress(f"reading {corpus.name}") as progress:
        texts = _Texts(corpus, TRAINING_BYTES[kind] if max_bytes is None else max_bytes, progress)
        train = _train_bpe if kind == "bpe" else _train_unigram
        definition = train(tokenizers, iter(texts), vocab_size)
    if not texts.count:
        raise LineartimeError(f"The train split of {corpus.name} is empty: give more text with --data.")
    return JsonTokenizer(definition, f"{kind} of {corpus.name}")


class _Texts:
    """The training split in blocks of whole lines, until there were `limit` bytes."""

    def __init__(self, corpus: Corpus, limit: int, progress: Progress) -> None:
        self.count = 0
        self._corpus = corpus
        self._limit = limit
        self._progress = progress

    def __iter__(self) -> Iterator[str]:
        for document in self._corpus.documents("train"):
            for text in whole_lines(document):
                yield text
                size = len(text.encode())
                self.count += size
                self._progress.advance(size)
                if self.count >= self._limit:
                    return


def _train_bpe(tokenizers: Any, texts: Iterator[str], vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    definition: str = tokenizer.to_str()
    return definition


def _train_unigram(tokenizers: Any, texts: Iterator[str], vocab_size: int) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    split = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [
            split.Split(tokenizers.Regex(_LIKE_A_NAME), "isolated"),
            split.Split("\n", "isolated"),
            split.Metaspace(prepend_scheme="never"),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=vocab_size - 256,
        special_tokens=[*_SPECIAL, _UNKNOWN],
        unk_token=_UNKNOWN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    definition = json.loads(tokenizer.to_str())
    # The library falls back to bytes where it finds pieces of these names, but its trainer makes none.
    lowest = min(score for _, score in definition["model"]["vocab"])
    definition["model"]["vocab"] += [[f"<0x{byte:02X}>", lowest - 10] for byte in range(256)]
    definition["model"]["byte_fallback"] = True
    return json.dumps(definition, ensure_ascii=False)


def names_tokenizer(choice: str) -> bool:
    """Whether `tokenizer_for` takes this for a name, not for a path."""
    return choice == "bytes" or _to_train(choice) is not None


def _to_train(choice: str) -> tuple[Kind, int] | None:
    """The kind and the size of a tokenizer such as bpe-32000."""
    name, _, number = choice.partition("-")
    kind = next((kind for kind in TRAINING_BYTES if kind == name), None)
    return None if kind is None or not number.isdecimal() else (kind, int(number))


def tokenizer_for(choice: str | Path | None, corpus: Corpus, cache: Path) -> Tokenizer:
    """The tokenizer that an option names.

    Args:
        choice: "bytes" or None; a file or a checkpoint directory; or "bpe-32000", "unigram-32000" or another number, which is
            trained on the training split of the corpus the first time, and then kept in the cache.
        corpus: the text it is for.
        cache: the folder to keep it in.

    Raises:
        LineartimeError: for anything else, and for what training it or reading it raises.
    """
    if choice is None or choice == "bytes":
        return ByteTokenizer()
    if isinstance(choice, Path):
        return load_tokenizer(choice)
    wanted = _to_train(choice)
    if wanted is None:
        if not Path(choice).exists():
            raise LineartimeError(
                f"--tokenizer {choice} is no file, and none of the names: use bytes, bpe-{VOCAB_SIZE}, unigram-{VOCAB_SIZE} or "
                "the path of a tokenizer.json."
            )
        return load_tokenizer(Path(choice))
    kind, vocab_size = wanted
    if vocab_size < _SMALLEST[kind]:
        raise LineartimeError(f"--tokenizer is {choice}, but {kind} needs at least {_SMALLEST[kind]} tokens.")
    key = "\n".join([str(_FORMAT), choice, str(TRAINING_BYTES[kind]), corpus.identity("train")])
    file = cache / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:20]}.tokenizer.json"
    if not file.exists():
        _keep(file, train_tokenizer(corpus, kind, vocab_size).to_json())
    return load_tokenizer(file)


def _keep(file: Path, definition: str) -> None:
    """Write a file that is whole from the moment it can be seen."""
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(definition, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise cannot("write", file, error) from None
    finally:
        partial.unlink(missing_ok=True)
