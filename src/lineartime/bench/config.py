"""The options of a benchmark."""

import dataclasses
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from lineartime.choices import Device, Precision
from lineartime.errors import Argument, ArgumentError

Measure = Literal["train", "forward", "prefill", "decode"]
Dtype = Literal["fp32", "bf16"]
Mode = Literal["eager", "compiled"]
Peer = Literal["flash-pytorch", "fla"]

STREAMED: tuple[Measure, ...] = ("prefill", "decode")
"""Measures that continue a stream, and so need a state."""
RESULTS_FILE = "results.json"
FOLDER = Path("runs") / "bench"


@dataclass(frozen=True)
class BenchConfig:
    """Measure what models cost: time, tokens/s, memory and use of the machine. Writes JSON, a table and plots to a folder."""

    presets: tuple[str, ...] = ("flash-tiny", "flash-quad-tiny", "transformer++-tiny")
    """Models to compare, by the names of their presets. Ratios are to the first one."""
    override: tuple[str, ...] = ()
    """Other values for fields of all models that have them, or of one model, for instance flash-tiny.n_blocks=12 dropout=0.1"""
    vocab_size: int | None = None
    """Tokens of the vocabulary; the default is that of each preset."""
    task: Literal["clm", "mlm"] = "clm"
    """clm: causal models; mlm: masked models, which read both ways and have no prefill and no decode."""
    measure: tuple[Measure, ...] = ("train", "forward", "prefill", "decode")
    """train: forward and backward; forward: forward alone; prefill: reading a prompt; decode: one more token."""
    context_lengths: tuple[int, ...] = (512, 2048)
    """Tokens of context for train, forward and prefill."""
    positions: tuple[int, ...] = (1024, 8192)
    """Tokens that a model has read before decode."""
    tokens_per_batch: int = 8192
    """Tokens in a batch at every context length, so that all lengths have equal work; a batch holds at least one sequence."""
    decode_batch: int = 1
    """Streams that prefill and decode continue at once."""
    dtypes: tuple[Precision, ...] = ("auto",)
    """Precision of matrix products; auto: the faster one here, as in training. bf16 is autocast, in decode bf16 weights."""
    modes: tuple[Mode, ...] = ("eager",)
    """eager: as it is; compiled: by torch.compile, for train, forward, and decode of models that step in place."""
    peers: tuple[Peer, ...] = ()
    """Other implementations to compare with, at the sizes of the first preset that has d_qk and chunk_size."""
    rounds: int = 5
    """Times that all models are measured in turn, A B A B; medians are over the rounds."""
    min_seconds: float = 0.2
    """Shortest duration of a measurement in seconds, reached by repeating the step."""
    warmup: int = 1
    """Steps that are not counted, after the very first one, which may compile."""
    memory: bool = True
    """Whether to measure memory; on a CPU, every model is measured in a process of its own, which takes some seconds."""
    metrics: tuple[Path, ...] = ()
    """For a plot of quality against cost: JSON files of {preset: bits per byte}, or folders of runs."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int | None = None
    """Threads of the CPU; the default is PyTorch's."""
    out: Path | None = None
    """Folder for the results, which must not hold any yet; the default is runs/bench, or runs/bench-2, and so on."""

    def to_dict(self) -> dict[str, Any]:
        """The options for JSON; only the names of paths, which mean nothing on other machines."""
        values = dataclasses.asdict(self)
        return {**values, "metrics": [path.name for path in self.metrics], "out": None if self.out is None else self.out.name}

    def folder(self) -> Path:
        """Where the results go; LineartimeError if `out` holds results already."""
        if self.out is None:
            folders = chain([FOLDER], (FOLDER.with_name(f"{FOLDER.name}-{number}") for number in count(2)))
            return next(folder for folder in folders if not folder.exists())
        if self.out.exists() and not self.out.is_dir():
            raise ArgumentError("out", f"is {self.out}, which is a file: give a folder.")
        if (self.out / RESULTS_FILE).exists():
            raise ArgumentError(
                "out", f"is {self.out}, which holds results, and these are never overwritten: give another folder."
            )
        return self.out

    def check(self) -> None:
        """Raise ArgumentError for a value that is not allowed."""
        for name in ("presets", "measure", "context_lengths", "positions", "dtypes", "modes"):
            if not getattr(self, name):
                raise ArgumentError(name, "is empty: give at least one value.")
        for name in ("context_lengths", "positions", "tokens_per_batch", "decode_batch", "rounds", "threads", "vocab_size"):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and number < 1:
                    raise ArgumentError(name, f"is {number}, but must be at least 1.")
        streamed = [measure for measure in self.measure if measure in STREAMED]
        if streamed and self.task != "clm":
            causal = Argument("task", "clm")
            raise ArgumentError("measure", f"has {streamed[0]}, which needs ", causal, ": leave it out, or use that task.")
        if self.warmup < 0:
            raise ArgumentError("warmup", f"is {self.warmup}, but must not be negative.")
        if not 0 <= self.min_seconds <= 3600:
            raise ArgumentError("min_seconds", f"is {self.min_seconds}, but must be from 0 to 3600.")

    def lengths(self, measure: Measure) -> tuple[str, tuple[int, ...]]:
        """The option that holds the lengths of a measure, and these."""
        name = "positions" if measure == "decode" else "context_lengths"
        return name, getattr(self, name)
