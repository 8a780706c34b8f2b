"""The options of a benchmark."""

from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal

from lineartime.choices import MAX_CONTEXT_LENGTH, Device, Precision
from lineartime.errors import ArgumentError
from lineartime.fields import AtLeastOne, Between, check_fields
from lineartime.host import Threads

Measure = Literal["train", "forward", "prefill", "decode"]
Dtype = Literal["fp32", "bf16"]
Mode = Literal["eager", "compiled"]
Length = Annotated[int, Between(1, MAX_CONTEXT_LENGTH)]

STREAMED: tuple[Measure, ...] = ("prefill", "decode")
"""Measures that continue a stream and therefore need a state."""
RESULTS_FILE = "results.json"
FOLDER = Path("runs") / "bench"


@dataclass(frozen=True)
class BenchConfig:
    """Measure what models cost: time, tokens/s and memory. Writes JSON, a table and plots to a folder."""

    presets: tuple[str, ...] = ("flash-tiny", "flash-quad-tiny", "transformer++-tiny")
    """Presets to compare, or PRESET:OPTION=VALUE, as in flash-tiny:chunk_size=64. Ratios are relative to the first one."""
    vocab_size: AtLeastOne | None = None
    """Vocabulary size; the default is each preset's own."""
    task: Literal["clm", "mlm"] = "clm"
    """clm: causal models; mlm: masked models, which are bidirectional and have no prefill or decode."""
    measure: tuple[Measure, ...] = ("train", "forward", "prefill", "decode")
    """train: forward and backward; forward: forward only; prefill: reading a prompt; decode: one more token."""
    context_lengths: tuple[Length, ...] = (512, 2048)
    """Context lengths, in tokens, for train, forward and prefill."""
    positions: tuple[Length, ...] = (1024, 8192)
    """Tokens that a model has read before decode is timed."""
    tokens_per_batch: AtLeastOne = 8192
    """Tokens in a batch of train and forward, equal at all context lengths; a batch holds at least one sequence."""
    decode_batch: AtLeastOne = 1
    """Number of streams that prefill and decode continue at once."""
    dtypes: tuple[Precision, ...] = ("auto",)
    """Precision of matrix products; auto: the faster one, as in training. bf16 means autocast, and bf16 weights for decode."""
    modes: tuple[Mode, ...] = ("eager",)
    """eager: not compiled; compiled: by torch.compile, for train, forward, and decode of models that step in place."""
    rounds: AtLeastOne = 5
    """Rounds in which all models are measured in turn, A B A B; medians are taken over the rounds."""
    min_seconds: Annotated[float, Between(0, 3600)] = 0.2
    """Minimum duration of a measurement in seconds; shorter steps are repeated."""
    device: Device = "auto"
    """Device to compute on; auto takes a GPU if there is one."""
    threads: Threads | None = None
    """Number of CPU threads; the default is PyTorch's."""
    out: Path | None = None
    """Folder for the results; it must not hold any yet. The default is runs/bench, or runs/bench-2, and so on."""

    def __post_init__(self) -> None:
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """The options for JSON. The folder is reduced to its name: a full path means nothing on other machines."""
        return {**asdict(self), "out": None if self.out is None else self.out.name}

    def folder(self) -> Path:
        """The folder for the results; raises LineartimeError if `out` already holds results."""
        if self.out is None:
            numbered = (FOLDER.with_name(f"{FOLDER.name}-{number}") for number in count(2))
            return next(folder for folder in chain([FOLDER], numbered) if not folder.exists())
        if (self.out / RESULTS_FILE).exists():
            why = "which holds results, and these are never overwritten"
            raise ArgumentError("out", f"is {self.out}, {why}: give another folder.")
        return self.out

    def check(self) -> None:
        """Raise ArgumentError for values that do not fit together."""
        for name in ("presets", "measure", "context_lengths", "positions", "dtypes", "modes"):
            if not getattr(self, name):
                raise ArgumentError(name, "is empty: give at least one value.")
        streamed = [measure for measure in self.measure if measure in STREAMED]
        if streamed and self.task != "clm":
            needs = f"has {streamed[0]}, which needs `task=clm`"
            raise ArgumentError("measure", f"{needs}: leave it out, or use that task.")

    def lengths(self, measure: Measure) -> tuple[int, ...]:
        """The lengths of a measure."""
        return self.positions if measure == "decode" else self.context_lengths

    def longest(self, measure: Measure) -> int:
        """The most tokens that a measure makes a model read: of decode, the next one and one more."""
        return max(self.lengths(measure)) + (2 if measure == "decode" else 0)
