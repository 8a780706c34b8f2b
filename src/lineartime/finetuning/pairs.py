"""Pairs of texts, a source and its target, and the options of training on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lineartime.choices import Device, Precision, Split
from lineartime.data.corpora import Corpus
from lineartime.data.splits import named_split
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import Between, Positive, check_fields
from lineartime.finetuning.config import NotNegative, Share, Size
from lineartime.finetuning.questions import HELD_OUT_EVERY, item, json_lines
from lineartime.models.encoder_decoder import EncoderDecoderConfig
from lineartime.models.presets import encoder_decoder_config
from lineartime.training.overrides import errors_in_override, read_override


@dataclass(frozen=True)
class PairsConfig:
    """Train an encoder-decoder on pairs of texts. The folder `out` gets the best model, its predictions and its metrics."""

    data: Path
    """JSON lines with source and target, of which every fifth is held out; or a folder with files for train and dev."""
    out: Path
    """New folder for the model."""
    preset: str = "flash-quad-tiny"
    """The layers and the size of both sides: a name that `lineartime presets` lists."""
    override: tuple[str, ...] = ()
    """Other values for the model, such as n_decoder_blocks=6 or cross.n_heads=4."""
    tokenizer: str = "bytes"
    """bytes; bpe-4000 or unigram-4000 to train one of that size on the pairs; hub:NAME; or the path of a tokenizer.json."""
    epochs: Positive = 10.0
    """Times that the training pairs are read."""
    batch_size: Size = 32
    """Pairs in each step."""
    learning_rate: Annotated[float, Between(above=0, most=1e5)] = 1e-3
    """Peak learning rate."""
    warmup: Share = 0.1
    """Share of the steps over which the learning rate rises from zero; then it falls to zero."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices."""
    dropout: Annotated[float, Between(0, below=1)] = 0.1
    """Dropout of every layer's output."""
    beams: Size = 1
    """Beams of the targets that are written to evaluate; 1 is the fastest."""
    max_target_tokens: Size | None = None
    """Maximum number of tokens in a target that is written; the default is the longest one of the data."""
    patience: Size | None = None
    """Stop after this many evaluations without a better model."""
    resume: bool = False
    """Go on where a training into this folder was stopped."""
    seed: Annotated[int, Between(0, below=2**32)] = 0
    """Seed of the initial weights, the order and the dropout."""
    precision: Precision = "auto"
    """Precision of matrix products: fp32 or bf16; auto takes the faster one."""
    device: Device = "auto"
    """Device to compute on; auto takes a GPU if there is one."""

    def __post_init__(self) -> None:
        """Raise ArgumentError for a value of the wrong type or out of range."""
        check_fields(self)

    def model(self, vocab_size: int) -> EncoderDecoderConfig:
        """The model for a vocabulary. Raises ArgumentError for an unknown preset, or an override that does not fit it."""
        values = dict(map(read_override, self.override))
        for name, source in (("vocab_size", "tokenizer"), ("dropout", "dropout")):
            if name in values:
                raise ArgumentError("override", f"cannot set {name}: use `{source}`.")
        encoder_decoder_config(self.preset)  # its errors are not those of the override
        with errors_in_override():
            return encoder_decoder_config(self.preset, **values, vocab_size=vocab_size, dropout=self.dropout)


@dataclass(frozen=True)
class Pair:
    """A source, and its target if it has one.

    Attributes:
        key: its id, or the number of its line.
        source: the text to read.
        target: the text to write.
        where: its file and line.
    """

    key: str
    source: str
    target: str
    where: str


def read_pairs(file: Path, *, targets: bool = True) -> Iterator[Pair]:
    """The pairs in a file of JSON lines with `source`, `target` and perhaps `id`; without `targets`, only the sources count.

    Raises:
        LineartimeError: naming the line, if it is something else; or if the file cannot be read.
    """
    for number, record in json_lines(file):
        names = ("source", "target") if targets else ("source",)
        texts = [item(file, f"line {number:,}", record, name, str) for name in names]
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise LineartimeError(f"{file} has line {number:,} with a half of a character (a surrogate): correct it.") from None
        yield Pair(str(record.get("id", number)), texts[0], texts[-1], f"{file}, line {number:,},")


def find_pairs(data: Path) -> dict[Split, list[Pair]]:
    """The pairs to train with and to validate with.

    Args:
        data: a file of JSON lines, of which every fifth pair is held out, or a folder with one for training and one for
            validation, which their names say (train, dev).

    Raises:
        ArgumentError: for another path.
        LineartimeError: if a file cannot be read, holds no pair, or holds something else.
    """
    if data.is_file():
        pairs = list(read_pairs(data))
        if len(pairs) < 2:
            raise LineartimeError(f"{data} holds {len(pairs)} pairs, but at least one is held out: give two or more.")
        return {
            "train": [pair for place, pair in enumerate(pairs) if place % HELD_OUT_EVERY],
            "validation": pairs[::HELD_OUT_EVERY],
        }
    if not data.is_dir():
        raise ArgumentError("data", f"is {data}, which does not exist: give a file of pairs, or a folder with two.")
    found: dict[Split, list[Pair]] = {}
    for split in ("train", "validation"):
        files = [file for file in sorted(data.glob("*.jsonl")) if named_split(file.name) == split]
        if len(files) != 1:
            names = ", ".join(file.name for file in files) or "none"
            advice = "give a folder with one, such as train.jsonl and dev.jsonl, or one file"
            raise ArgumentError("data", f"is {data}, which must hold one .jsonl named for {split}, but has {names}: {advice}.")
        found[split] = list(read_pairs(files[0]))
        if not found[split]:
            raise LineartimeError(f"{files[0]} holds no pair: give another file.")
    return found


@dataclass(frozen=True)
class _Texts:
    """The texts of pairs, as a source of a corpus."""

    name: str
    pairs: Sequence[Pair]

    def describe(self, split: Split) -> str:
        return self.name

    def identity(self, split: Split) -> str:
        return self.name

    def documents(self, split: Split) -> Iterator[Iterator[str]]:
        for pair in self.pairs:
            yield iter((f"{pair.source}\n{pair.target}\n",))


def corpus_of(name: str, pairs: Sequence[Pair]) -> Corpus:
    """The text of pairs, for a tokenizer to learn from."""
    source: Any = _Texts(name, pairs)
    return Corpus((source,))
