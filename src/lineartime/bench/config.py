"""Everything a benchmark is told, which is also what `lineartime bench --help` shows, and the plan that follows from it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from lineartime.bench.peers import PEERS, Peer, check_peer
from lineartime.bench.subjects import STREAMED, Case, Dtype, Measure, Mode, Subject
from lineartime.errors import LineartimeError
from lineartime.machine import Device, choose_device, compiler_missing
from lineartime.models.config import ModelConfig, Task
from lineartime.models.heads import build_model
from lineartime.models.presets import PRESETS, resolve
from lineartime.training.config import TrainConfig

FOLDER = Path("runs") / "bench"


@dataclass(frozen=True)
class Plan:
    """What is measured: every case, each with the subjects that take turns in it."""

    device: torch.device
    cells: tuple[tuple[Case, tuple[Subject, ...]], ...]

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """All subjects, in the order in which they were asked for."""
        return tuple(dict.fromkeys(subject for _, subjects in self.cells for subject in subjects))


@dataclass(frozen=True)
class BenchConfig:
    """Measure what models cost: time, tokens/s, memory and use of the machine; leaves JSON, a table and plots in --out."""

    presets: tyro.conf.Positional[tuple[str, ...]] = ("flash-tiny", "flash-quad-tiny", "transformer++-tiny")
    """Models to compare: names that `lineartime presets` lists. Ratios are to the first one."""
    override: tuple[str, ...] = ()
    """Other values for fields of the models that have them, or of one: --override flash-tiny.n_blocks=12 dropout=0.1"""
    vocab_size: int | None = None
    """Tokens of the vocabulary; the default is that of each preset."""
    task: Task = "clm"
    """clm, causal models, or mlm, masked ones, which look both ways: no prefill, no decode."""
    measure: tuple[Measure, ...] = ("train", "forward", "prefill", "decode")
    """train: forward and backward; forward: forward alone; prefill: reading a prompt; decode: one more token."""
    context_lengths: tuple[int, ...] = (512, 2048)
    """Tokens of context to train on, to read at once and to read as a prompt."""
    positions: tuple[int, ...] = (1024, 8192)
    """For decode: how many tokens the model has read before."""
    tokens_per_batch: int = 8192
    """Tokens in a batch at every context length, so that all lengths have equal work; a batch holds one sequence at least."""
    decode_batch: int = 1
    """Streams that prefill and decode continue at once."""
    dtypes: tuple[Dtype, ...] = ("fp32",)
    """Precision of matrix products; bf16 by autocast, as in training. Weights are always fp32."""
    modes: tuple[Mode, ...] = ("eager",)
    """eager: as it is; compiled: by torch.compile, for train and forward. Streams are always eager."""
    peers: tuple[Peer, ...] = ()
    """Implementations of others to compare with, at the sizes of the first preset that has d_qk and chunk_size."""
    rounds: int = 5
    """Times that all are measured in turn, A B A B; medians are over the rounds."""
    min_seconds: float = 0.2
    """Seconds that a measurement lasts at least, by repeating what is measured."""
    warmup: int = 1
    """Runs that are not counted, after the very first one, which may compile."""
    memory: bool = True
    """Whether to measure memory; on a CPU, each is measured in a process of its own, which takes some seconds."""
    metrics: tuple[Path, ...] = ()
    """For a plot of quality against cost: JSON files of {preset: bits per byte}, or folders of runs."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    threads: int | None = None
    """Threads of the CPU; the default is PyTorch's."""
    out: Path | None = None
    """Folder for the results, which must not hold any yet; the default is runs/bench, or runs/bench-2, and so on."""

    def plan(self) -> Plan:
        """What these options ask for; LineartimeError, naming the option, where that cannot be measured."""
        self._check_numbers()
        configs = self._model_configs()
        device = choose_device(self.device)
        self._check_machine(device)
        cells = []
        for measure in dict.fromkeys(self.measure):
            subjects = self._subjects(measure, configs, device)
            lengths = self.positions if measure == "decode" else self.context_lengths
            for dtype in dict.fromkeys(self.dtypes):
                for length in dict.fromkeys(lengths):
                    cells.append((Case(measure, length, dtype, self._batch(measure, length)), subjects))
        return Plan(device, tuple(cells))

    def to_dict(self) -> dict[str, Any]:
        """The options for JSON; of paths, which are of no use to others, only the names."""
        values = dataclasses.asdict(self)
        return {**values, "metrics": [path.name for path in self.metrics], "out": None if self.out is None else self.out.name}

    def folder(self) -> Path:
        """Where the results go; LineartimeError if --out holds results already."""
        if self.out is None:
            number, folder = 1, FOLDER
            while folder.exists():
                number += 1
                folder = FOLDER.with_name(f"{FOLDER.name}-{number}")
            return folder
        if self.out.exists() and not self.out.is_dir():
            raise LineartimeError(f"--out {self.out} is a file: give a folder.")
        if (self.out / "results.json").exists():
            raise LineartimeError(f"--out {self.out} already holds results, which are never overwritten: give another folder.")
        return self.out

    def _check_numbers(self) -> None:
        for option in ("presets", "measure", "context_lengths", "positions", "dtypes", "modes"):
            if not getattr(self, option):
                raise LineartimeError(f"{_flag(option)} is empty: give at least one value, or leave it out.")
        for option in ("context_lengths", "positions", "tokens_per_batch", "decode_batch", "rounds", "threads", "vocab_size"):
            value = getattr(self, option)
            for number in value if isinstance(value, tuple) else () if value is None else (value,):
                if number < 1:
                    raise LineartimeError(f"{_flag(option)} is {number}, but must be at least 1.")
        streamed = [measure for measure in self.measure if measure in STREAMED]
        if streamed and self.task != "clm":
            raise LineartimeError(f"--measure {streamed[0]} needs causal models: use --task clm, or --measure train forward.")
        if self.warmup < 0:
            raise LineartimeError(f"--warmup is {self.warmup}, but must not be negative.")
        if not 0 <= self.min_seconds <= 3600:
            raise LineartimeError(f"--min-seconds is {self.min_seconds}, but must be from 0 to 3600.")

    def _check_machine(self, device: torch.device) -> None:
        bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        if "bf16" in self.dtypes and not bf16:
            raise LineartimeError("--dtypes has bf16, which this GPU does not know: leave it out.")
        missing = compiler_missing(device)
        if "compiled" in self.modes and missing:
            raise LineartimeError(f"--modes has compiled, but {missing}: install g++ or leave it out.")

    def _model_configs(self) -> dict[str, ModelConfig]:
        names = tuple(dict.fromkeys(self.presets))
        fields = {name: self._fields(name) for name in names}
        for item in self.override:
            key, equals, _ = item.partition("=")
            preset, dot, field = key.rpartition(".")
            if dot and preset not in fields:
                raise LineartimeError(
                    f"--override: {preset!r} in {item!r} is none of the presets to compare: {', '.join(names)}."
                )
            known = fields[preset] if dot else dict.fromkeys(name for each in fields.values() for name in each)
            if field == "vocab_size":
                raise LineartimeError("--override cannot set vocab_size: use --vocab-size.")
            if equals and field not in known:
                whose = preset if dot else "any of these models"
                raise LineartimeError(f"--override: {field!r} is not a field of {whose}; there are {', '.join(known)}.")
        return {name: self._model_config(name, fields[name]) for name in names}

    def _fields(self, preset: str) -> dict[str, None]:
        """The names that --override can give a value in the model of a preset."""
        if preset not in PRESETS and preset in PEERS:
            raise LineartimeError(f"{preset} is no preset: give it after --peers.")
        try:
            config = resolve(preset, self.task).to_dict()
        except ValueError as error:
            raise LineartimeError(str(error).replace("use task='mlm'", "use --task mlm")) from None
        parts = [config, *(part for part in config.values() if isinstance(part, dict))]
        return dict.fromkeys(name for part in parts for name in part if name not in ("kind", "vocab_size", "task"))

    def _model_config(self, preset: str, fields: dict[str, None]) -> ModelConfig:
        shared = [item for item in self.override if "." not in item.partition("=")[0]]
        override = tuple(item for item in shared if "=" not in item or item.partition("=")[0] in fields)
        override += tuple(item.removeprefix(f"{preset}.") for item in self.override if item.startswith(f"{preset}."))
        # Read as the options of training are, with the same answers to what is wrong.
        options = TrainConfig(preset=preset, override=override, task=self.task, context_length=1)
        config = options.model_config(self.vocab_size or resolve(preset, self.task).vocab_size)
        try:
            with torch.device("meta"):
                build_model(config.override(n_blocks=1))
        except ValueError as error:
            raise LineartimeError(f"--override: {error}") from None
        longest = config.longest_sequence
        reads: list[tuple[str, Sequence[int]]] = []
        if set(self.measure) - {"decode"}:
            reads.append(("context_lengths", self.context_lengths))
        if "decode" in self.measure:
            reads.append(("positions", [position + 1 for position in self.positions]))
        for option, lengths in reads:
            if longest is not None and max(lengths) > longest:
                field = "max_positions" if longest == config.max_positions else "max_length"
                raise LineartimeError(
                    f"{_flag(option)} make {preset} read {max(lengths)} tokens, but it reads at most {longest}: use a shorter "
                    f"one, or --override {field}={max(lengths)}."
                )
        return config

    def _subjects(self, measure: Measure, configs: dict[str, ModelConfig], device: torch.device) -> tuple[Subject, ...]:
        if measure in STREAMED:
            return tuple(Subject(name, "eager", config) for name, config in configs.items())
        modes = tuple(dict.fromkeys(self.modes))
        subjects = [Subject(name, mode, config) for name, config in configs.items() for mode in modes]
        for peer in dict.fromkeys(self.peers):
            if peer == "fla" and self.task != "clm":
                raise LineartimeError("--peers fla is causal alone: use --task clm, or leave it out.")
            gated = [config for config in configs.values() if {"d_qk", "chunk_size"} <= config.to_dict()["mixer"].keys()]
            if not gated:
                raise LineartimeError(f"--peers {peer} takes its sizes from a preset with d_qk and chunk_size: add flash-tiny.")
            check_peer(peer, device)
            subjects += [Subject(peer, mode, gated[0], is_peer=True) for mode in modes]
        return tuple(subjects)

    def _batch(self, measure: Measure, length: int) -> int:
        return self.decode_batch if measure in STREAMED else max(1, self.tokens_per_batch // length)


def _flag(option: str) -> str:
    return option if option == "presets" else "--" + option.replace("_", "-")
