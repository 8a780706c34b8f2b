"""The options of a benchmark, and the plan that follows from them."""

import dataclasses
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from lineartime.bench.peers import PEERS, Peer, check_peer
from lineartime.bench.results import RESULTS_FILE
from lineartime.bench.subjects import STREAMED, Case, Dtype, Measure, Mode, Subject
from lineartime.errors import ArgumentError
from lineartime.machine import Device, Precision, choose_device, compiler_missing, faster_precision, supports_bf16
from lineartime.models.config import ModelConfig, Task
from lineartime.models.heads import build_model
from lineartime.models.presets import PRESETS, resolve
from lineartime.training.config import TrainConfig

FOLDER = Path("runs") / "bench"


@dataclass(frozen=True)
class Plan:
    """What to measure: every case with the subjects that take turns in it.

    Attributes:
        device: where.
        cells: the cases with their subjects.
        precision: which precision "auto" chose and why; empty if nothing was left to it.
    """

    device: torch.device
    cells: tuple[tuple[Case, tuple[Subject, ...]], ...]
    precision: str = ""

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """All subjects, in the order of the options."""
        return tuple(dict.fromkeys(subject for _, subjects in self.cells for subject in subjects))


@dataclass(frozen=True)
class BenchConfig:
    """Measure what models cost: time, tokens/s, memory and use of the machine. Writes JSON, a table and plots to a folder."""

    presets: tuple[str, ...] = ("flash-tiny", "flash-quad-tiny", "transformer++-tiny")
    """Models to compare, by the names of their presets. Ratios are to the first one."""
    override: tuple[str, ...] = ()
    """Other values for fields of all models that have them, or of one model, for instance flash-tiny.n_blocks=12 dropout=0.1"""
    vocab_size: int | None = None
    """Tokens of the vocabulary; the default is that of each preset."""
    task: Task = "clm"
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
    """Precision of matrix products; auto: the faster one here, as in training. bf16 is autocast: weights are always fp32."""
    modes: tuple[Mode, ...] = ("eager",)
    """eager: as it is; compiled: by torch.compile, for train and forward. Streams are always eager."""
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

    def plan(self) -> Plan:
        """What these options ask for; LineartimeError if it cannot be measured."""
        self._check_values()
        configs = self._model_configs()
        device = choose_device(self.device)
        self._check_machine(device)
        dtypes, precision = self._precisions(device)
        cells = []
        for measure in dict.fromkeys(self.measure):
            subjects = self._subjects(measure, configs, device)
            _, lengths = self._lengths(measure)
            sizes = [(n, self.decode_batch if measure in STREAMED else max(1, self.tokens_per_batch // n)) for n in lengths]
            cases = [Case(measure, length, dtype, batch) for dtype in dtypes for length, batch in sizes]
            cells += [(case, subjects) for case in dict.fromkeys(cases)]
        return Plan(device, tuple(cells), precision)

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

    def _check_values(self) -> None:
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
            raise ArgumentError("measure", f"has {streamed[0]}, which needs the task clm: leave it out, or use that task.")
        if self.warmup < 0:
            raise ArgumentError("warmup", f"is {self.warmup}, but must not be negative.")
        if not 0 <= self.min_seconds <= 3600:
            raise ArgumentError("min_seconds", f"is {self.min_seconds}, but must be from 0 to 3600.")

    def _check_machine(self, device: torch.device) -> None:
        if "bf16" in self.dtypes and not supports_bf16(device):
            raise ArgumentError("dtypes", "has bf16, which this GPU does not support: leave it out.")
        missing = compiler_missing(device)
        if "compiled" in self.modes and missing:
            raise ArgumentError("modes", f"has compiled, but {missing}: install g++, or leave it out.")

    def _precisions(self, device: torch.device) -> tuple[list[Dtype], str]:
        """The precisions to measure in, and what "auto" chose and why."""
        chosen, reason = faster_precision(device) if "auto" in self.dtypes else ("fp32", "")
        dtypes = dict.fromkeys(chosen if dtype == "auto" else dtype for dtype in self.dtypes)
        return list(dtypes), f"{chosen}, because {reason}" if reason else ""

    def _model_configs(self) -> dict[str, ModelConfig]:
        fields = {name: self._fields(name) for name in self.presets}
        for item in self.override:
            key, equals, _ = item.partition("=")
            preset, dot, field = key.rpartition(".")
            if dot and preset not in fields:
                raise ArgumentError("override", f"has {item!r}, but {preset!r} is not among the presets: {', '.join(fields)}.")
            known = fields[preset] if dot else dict.fromkeys(chain(*fields.values()))
            if field == "vocab_size":
                raise ArgumentError("override", "cannot set vocab_size: use the option vocab_size.")
            if equals and field not in known:
                whose, there = preset if dot else "any of these models", ", ".join(known)
                raise ArgumentError("override", f"has {field!r}, which is not a field of {whose}; there are {there}.")
        return {name: self._model_config(name, known) for name, known in fields.items()}

    def _fields(self, preset: str) -> dict[str, None]:
        """The fields that `override` can set in the model of a preset."""
        if preset not in PRESETS and preset in PEERS:
            raise ArgumentError("presets", f"has {preset}, which is a peer: give it among the peers.")
        names = resolve(preset, self.task).override_names
        return dict.fromkeys(name for name in names if name not in ("vocab_size", "task"))

    def _model_config(self, preset: str, fields: dict[str, None]) -> ModelConfig:
        shared = [item for item in self.override if "=" not in item or item.partition("=")[0] in fields]
        own = [item.removeprefix(f"{preset}.") for item in self.override if item.startswith(f"{preset}.")]
        # Read the values as training does, with the same errors.
        options = TrainConfig(preset=preset, override=(*shared, *own), task=self.task, context_length=1)
        config = options.model_config(self.vocab_size or resolve(preset, self.task).vocab_size)
        try:
            with torch.device("meta"):
                build_model(config.override(n_blocks=1))
        except ValueError as error:
            raise ArgumentError("override", f"does not make a model of {preset}: {error}") from None
        self._check_lengths(preset, config)
        return config

    def _check_lengths(self, preset: str, config: ModelConfig) -> None:
        """Raise ArgumentError for a length that the model cannot read."""
        longest = config.longest_sequence
        for measure in self.measure:
            name, lengths = self._lengths(measure)
            length = max(lengths) + (measure == "decode")
            if longest is not None and length > longest:
                field = "max_positions" if longest == config.max_positions else "max_length"
                raise ArgumentError(
                    name,
                    f"make {preset} read {length} tokens, but it reads at most {longest}: use shorter ones, or override "
                    f"{field}={length}.",
                )

    def _lengths(self, measure: Measure) -> tuple[str, tuple[int, ...]]:
        """The option that holds the lengths of a measure, and these."""
        name = "positions" if measure == "decode" else "context_lengths"
        return name, getattr(self, name)

    def _subjects(self, measure: Measure, configs: dict[str, ModelConfig], device: torch.device) -> tuple[Subject, ...]:
        if measure in STREAMED:
            return tuple(Subject(name, "eager", config) for name, config in configs.items())
        modes = tuple(dict.fromkeys(self.modes))
        subjects = [Subject(name, mode, config) for name, config in configs.items() for mode in modes]
        for peer in dict.fromkeys(self.peers):
            if peer == "fla" and self.task != "clm":
                raise ArgumentError("peers", "has fla, which needs the task clm: leave it out, or use that task.")
            gated = [config for config in configs.values() if {"d_qk", "chunk_size"} <= config.to_dict()["mixer"].keys()]
            if not gated:
                raise ArgumentError(
                    "peers", f"has {peer}, which takes its sizes from a preset with d_qk and chunk_size: add flash-tiny."
                )
            check_peer(peer, device)
            subjects += [Subject(peer, mode, gated[0], is_peer=True) for mode in modes]
        return tuple(subjects)
