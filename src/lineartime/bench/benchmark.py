"""Turn the options of a benchmark into the models and cases to measure."""

from dataclasses import dataclass
from itertools import chain

import torch

from lineartime.bench.config import STREAMED, BenchConfig, Dtype, Measure
from lineartime.bench.peers import PEERS, check_peer
from lineartime.bench.subjects import Case, Subject
from lineartime.errors import ArgumentError, did_you_mean
from lineartime.machine import choose_device, compiler_missing, faster_precision, supports_bf16
from lineartime.models.config import LAYERS, ModelConfig
from lineartime.models.language_model import build_model
from lineartime.models.presets import PRESETS, resolve
from lineartime.shapes import shapes_only
from lineartime.training.config import TrainConfig


@dataclass(frozen=True)
class Benchmark:
    """What is measured: cases, each with the subjects that take turns in it."""

    device: torch.device  # the device to measure on
    cases: tuple[tuple[Case, tuple[Subject, ...]], ...]  # each with its subjects
    precision: str = ""  # which precision "auto" chose, and why; empty without "auto"

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """All subjects, in the order of the options."""
        return tuple(dict.fromkeys(subject for _, subjects in self.cases for subject in subjects))

    @property
    def compiled(self) -> bool:
        """Whether any subject is compiled."""
        return any(subject.mode == "compiled" for subject in self.subjects)


def make_benchmark(options: BenchConfig) -> Benchmark:
    """The benchmark that the options describe; raises LineartimeError if it cannot be measured."""
    options.check()
    configs = _model_configs(options)
    device = choose_device(options.device)
    if "bf16" in options.dtypes and not supports_bf16(device):
        raise ArgumentError("dtypes", "has bf16, which this GPU does not support: leave it out.")
    if "compiled" in options.modes and (missing := compiler_missing(device)):
        raise ArgumentError("modes", f"has compiled, but {missing}: install g++, or leave it out.")
    chosen, reason = faster_precision(device) if "auto" in options.dtypes else ("fp32", "")
    dtypes: dict[Dtype, None] = dict.fromkeys(chosen if dtype == "auto" else dtype for dtype in options.dtypes)
    cases = []
    for measure in dict.fromkeys(options.measure):
        subjects = _subjects(options, measure, configs, device)
        for dtype in dtypes:
            for length in dict.fromkeys(options.lengths(measure)):
                batch = options.decode_batch if measure in STREAMED else max(1, options.tokens_per_batch // length)
                cases.append((Case(measure, length, dtype, batch), subjects))
    return Benchmark(device, tuple(cases), f"{chosen}, because {reason}" if reason else "")


def _model_configs(options: BenchConfig) -> dict[str, ModelConfig]:
    """The models of the presets, with what `override` changes in all of them or in one."""
    fields = {name: _fields(options, name) for name in options.presets}
    for item in options.override:
        key, equals, _ = item.partition("=")
        preset, dot, field = key.partition(".")
        if not dot or preset in LAYERS:  # an option of a layer
            preset, field = "", key
        elif preset not in fields:
            raise ArgumentError("override", f"has {item!r}, but {preset!r} is not among the presets: {', '.join(fields)}.")
        known = fields[preset] if preset else list(dict.fromkeys(chain(*fields.values())))
        if field == "vocab_size":
            raise ArgumentError("override", "cannot set vocab_size: use `vocab_size`.")
        if equals and field.rpartition(".")[2] not in known:
            whose = f"{preset or 'any of these models'}{did_you_mean(field, known)}"
            raise ArgumentError("override", f"has {field!r}, which is not a field of {whose}; there are {', '.join(known)}.")
    return {name: _model_config(options, name, known) for name, known in fields.items()}


def _fields(options: BenchConfig, preset: str) -> list[str]:
    """The fields that `override` can set in the model of a preset."""
    if preset not in PRESETS and preset in PEERS:
        raise ArgumentError("presets", f"has {preset}, which is a peer: give it in `peers`.")
    return [name for name in resolve(preset, options.task).override_names if name not in ("vocab_size", "task")]


def _model_config(options: BenchConfig, preset: str, fields: list[str]) -> ModelConfig:
    parts = tuple(f"{part}." for part in LAYERS)
    shared = [
        each for each in options.override if "=" not in each or each.startswith(parts) or each.partition("=")[0] in fields
    ]
    own = [item.removeprefix(f"{preset}.") for item in options.override if item.startswith(f"{preset}.")]
    # Parse the values as training does, to raise the same errors.
    training = TrainConfig(preset=preset, override=(*shared, *own), task=options.task, context_length=1)
    config = training.model_config(options.vocab_size or resolve(preset, options.task).vocab_size)
    try:
        with shapes_only():
            build_model(config.first_round)
    except ValueError as error:
        raise ArgumentError("override", f"does not make a model of {preset}: {error}") from None
    longest = config.longest_sequence
    for measure in options.measure:
        length = max(options.lengths(measure)) + (2 if measure == "decode" else 0)
        if longest is not None and length > longest:
            field = "max_positions" if longest == config.max_positions else "max_length"
            found = f"make {preset} read {length} tokens, but it reads at most {longest}: use shorter ones, or "
            name = "positions" if measure == "decode" else "context_lengths"
            raise ArgumentError(name, found, f"`override` {field}={length}.")
    return config


def _subjects(
    options: BenchConfig, measure: Measure, configs: dict[str, ModelConfig], device: torch.device
) -> tuple[Subject, ...]:
    """The models that take part in a measure, in all their modes, and the peers, which have no streams."""
    modes = tuple(dict.fromkeys(options.modes))
    subjects = []
    for name, config in configs.items():
        steps_in_place = measure == "decode" and config.constant_state
        for mode in modes if measure not in STREAMED or steps_in_place else ("eager",):
            subjects.append(Subject(name, mode, config))
    for peer in dict.fromkeys(options.peers) if measure not in STREAMED else ():
        if peer == "fla" and options.task != "clm":
            raise ArgumentError("peers", "has fla, which needs `task='clm'`: leave it out, or use that task.")
        gated = [config for config in configs.values() if {"d_qk", "chunk_size"} <= config.mixer.options.keys()]
        if not gated:
            sizes = "which takes its sizes from a preset with d_qk and chunk_size"
            raise ArgumentError("peers", f"has {peer}, {sizes}: add flash-tiny.")
        check_peer(peer, device)
        subjects += [Subject(peer, mode, gated[0], is_peer=True) for mode in modes]
    return tuple(subjects)
