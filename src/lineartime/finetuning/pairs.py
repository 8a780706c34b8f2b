"""Pairs of texts: a source and its target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineartime.choices import Split
from lineartime.data.corpora import Corpus
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.finetuning.questions import HELD_OUT_EVERY, item, one_of_each_split
from lineartime.finetuning.records import read_lines


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
    for number, (where, record) in enumerate(read_lines(file), 1):
        names = ("source", "target") if targets else ("source",)
        texts = [item(file, where, record, name, str) for name in names]
        yield Pair(str(record.get("id", number)), texts[0], texts[-1], f"{file}, {where},")


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
    for split, file in one_of_each_split(data, (".jsonl",), "train.jsonl and dev.jsonl").items():
        found[split] = list(read_pairs(file))
        if not found[split]:
            raise LineartimeError(f"{file} holds no pair: give another file.")
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
