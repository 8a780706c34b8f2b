"""Turn the options of a benchmark into a plan: which models to measure, how, and in which order."""

from dataclasses import dataclass
from itertools import chain

import torch

from lineartime.bench.config import STREAMED, BenchConfig, Dtype, Measure
from lineartime.bench.peers import PEERS, check_peer
from lineartime.bench.subjects import Case, Subject
from lineartime.errors import Argument, ArgumentError, did_you_mean
from lineartime.machine import choose_device, compiler_missing, faster_precision, supports_bf16
from lineartime.models.config import ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.presets import PRESETS, resolve
from lineartime.shapes import shapes_only
from lineartime.training.config import TrainConfig


@dataclass(frozen=True)
class Plan:
    """The cases to measure, each with the subjects that take turns in it.

    Attributes:
        device: the device to measure on.
        cells: the cases with their subjects.
        precision: which precision "auto" chose, and why; empty without "auto".
    """

    device: torch.device
    cells: tuple[tuple[Case, tuple[Subject, ...]], ...]
    precision: str = ""

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """All subjects, in the order of the options."""
        return tuple(dict.fromkeys(subject for _, subjects in self.cells for subject in subjects))


def make_plan(options: BenchConfig) -> Plan:
    """Make a plan from the options; raises LineartimeError if they cannot be measured."""
    options.check()
    configs = _model_configs(options)
    device = choose_device(options.device)
    _check_machine(options, device)
    dtypes, precision = _precisions(options, device)
    cells = []
    for measure in dict.fromkeys(options.measure):
        subjects = _subjects(options, measure, configs, device)
        _, lengths = options.lengths(measure)
        sizes = [(n, options.decode_batch if measure in STREAMED else max(1, options.tokens_per_batch // n)) for n in lengths]
        cases = [Case(measure, length, dtype, batch) for dtype in dtypes for length, batch in sizes]
        cells += [(case, subjects) for case in dict.fromkeys(cases)]
    return Plan(device, tuple(cells), precision)


def _check_machine(options: BenchConfig, device: torch.device) -> None:
    if "bf16" in options.dtypes and not supports_bf16(device):
        raise ArgumentError("dtypes", "has bf16, which this GPU does not support: leave it out.")
    missing = compiler_missing(device)
    if "compiled" in options.modes and missing:
        raise ArgumentError("modes", f"has compiled, but {missing}: install g++, or leave it out.")


def _precisions(options: BenchConfig, device: torch.device) -> tuple[list[Dtype], str]:
    """The precisions to measure in, and which one "auto" chose and why."""
    chosen, reason = faster_precision(device) if "auto" in options.dtypes else ("fp32", "")
    dtypes = dict.fromkeys(chosen if dtype == "auto" else dtype for dtype in options.dtypes)
    return list(dtypes), f"{chosen}, because {reason}" if reason else ""


def _model_configs(options: BenchConfig) -> dict[str, ModelConfig]:
    fields = {name: _fields(options, name) for name in options.presets}
    for item in options.override:
        key, equals, _ = item.partition("=")
        preset, dot, field = key.rpartition(".")
        if dot and preset not in fields:
            raise ArgumentError("override", f"has {item!r}, but {preset!r} is not among the presets: {', '.join(fields)}.")
        known = fields[preset] if dot else dict.fromkeys(chain(*fields.values()))
        if field == "vocab_size":
            raise ArgumentError("override", "cannot set vocab_size: use ", Argument("vocab_size"), ".")
        if equals and field not in known:
            whose = f"{preset if dot else 'any of these models'}{did_you_mean(field, known)}"
            raise ArgumentError("override", f"has {field!r}, which is not a field of {whose}; there are {', '.join(known)}.")
    return {name: _model_config(options, name, known) for name, known in fields.items()}


def _fields(options: BenchConfig, preset: str) -> dict[str, None]:
    """The fields that `override` can set in the model of a preset."""
    if preset not in PRESETS and preset in PEERS:
        raise ArgumentError("presets", f"has {preset}, which is a peer: give it in ", Argument("peers"), ".")
    names = resolve(preset, options.task).override_names
    return dict.fromkeys(name for name in names if name not in ("vocab_size", "task"))


def _model_config(options: BenchConfig, preset: str, fields: dict[str, None]) -> ModelConfig:
    shared = [item for item in options.override if "=" not in item or item.partition("=")[0] in fields]
    own = [item.removeprefix(f"{preset}.") for item in options.override if item.startswith(f"{preset}.")]
    # Parse the values as training does, to raise the same errors.
    training = TrainConfig(preset=preset, override=(*shared, *own), task=options.task, context_length=1)
    config = training.model_config(options.vocab_size or resolve(preset, options.task).vocab_size)
    try:
        with shapes_only():
            build_model(config.override(n_blocks=1))
    except ValueError as error:
        raise ArgumentError("override", f"does not make a model of {preset}: {error}") from None
    _check_lengths(options, preset, config)
    return config


def _check_lengths(options: BenchConfig, preset: str, config: ModelConfig) -> None:
    """Raise ArgumentError for a length that the model cannot read."""
    longest = config.longest_sequence
    for measure in options.measure:
        name, lengths = options.lengths(measure)
        length = max(lengths) + (2 if measure == "decode" else 0)
        if longest is not None and length > longest:
            field = "max_positions" if longest == config.max_positions else "max_length"
            raise ArgumentError(
                name,
                f"make {preset} read {length} tokens, but it reads at most {longest}: use shorter ones, or ",
                Argument("override"),
                f" {field}={length}.",
            )


def _subjects(
    options: BenchConfig, measure: Measure, configs: dict[str, ModelConfig], device: torch.device
) -> tuple[Subject, ...]:
    modes = tuple(dict.fromkeys(options.modes))
    if measure in STREAMED:
        return tuple(
            Subject(name, mode, config)
            for name, config in configs.items()
            for mode in (modes if measure == "decode" and config.mixer.layer.constant_state else ("eager",))
        )
    subjects = [Subject(name, mode, config) for name, config in configs.items() for mode in modes]
    for peer in dict.fromkeys(options.peers):
        if peer == "fla" and options.task != "clm":
            raise ArgumentError("peers", "has fla, which needs ", Argument("task", "clm"), ": leave it out, or use that task.")
        gated = [config for config in configs.values() if {"d_qk", "chunk_size"} <= config.to_dict()["mixer"].keys()]
        if not gated:
            raise ArgumentError(
                "peers", f"has {peer}, which takes its sizes from a preset with d_qk and chunk_size: add flash-tiny."
            )
        check_peer(peer, device)
        subjects += [Subject(peer, mode, gated[0], is_peer=True) for mode in modes]
    return tuple(subjects)
