"""The runs of an experiment: which models in which settings, the options of each run, and the folder that holds them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

from lineartime.choices import Device, Task
from lineartime.errors import ArgumentError, did_you_mean
from lineartime.experiments import catalogue
from lineartime.experiments.catalogue import Arm, Experiment, Scale, Setting
from lineartime.experiments.config import TASK_OPTIONS, TEXT_OPTIONS, ReproduceConfig, check_among, shown_option
from lineartime.experiments.memory import TASKS
from lineartime.files import read_file
from lineartime.machine import choose_device, choose_precision
from lineartime.models.config import ModelConfig
from lineartime.models.cost import count_parameters
from lineartime.models.systems import PRESETS, SIZES, SYSTEMS, Size, resolve
from lineartime.training.config import read_override, written

PLAN_FILE = "plan.json"
PLAN_OPTIONS = (
    *(*TEXT_OPTIONS, "budget", "tuning", "optimizers", "compile", "precision", "threads", "rates", "device", "add", "longer"),
    *TASK_OPTIONS,
)
"""The options on which runs depend, besides the experiment and the scale, which name the folder."""
TRIAL_CONTEXT, TRIAL_PAIRS = 64, 4
TOLERANCE = 0.03
"""The largest allowed relative difference of a model's number of parameters from the first one's."""

parameters_of = cache(count_parameters)
"""The number of parameters of a model."""


@dataclass(frozen=True)
class Job:
    """What one process does: train, on text or on a task, and test.

    Of speed, a few steps measure how fast a model trains; of tune, a short run tries a learning rate.
    """

    folder: Path  # where it leaves its files
    kind: Literal["speed", "tune", "run"]
    setting: Setting
    options: dict[str, Any]  # of training; None for steps that are not known yet
    tests: tuple[int, ...] = ()  # the contexts to measure at the end, as multiples of that of training
    test_tokens: int = 0  # how much of the test split they read
    problem: str = ""  # why it cannot be done yet

    @property
    def name(self) -> str:
        """Its folder, from that of the experiment on: setting, system and run."""
        return "/".join(self.folder.parts[-3:])


@dataclass(frozen=True)
class Candidate:
    """An arm in a setting: its model at the vocabulary of the text, and the options and the folder of all its runs."""

    arm: Arm
    setting: Setting
    model: ModelConfig
    options: Mapping[str, Any] = field(repr=False)
    folder: Path
    parameters: int


@dataclass(frozen=True)
class Plan:
    """An experiment at a scale with all its runs."""

    config: ReproduceConfig  # with defaults of the experiment and the scale
    experiment: Experiment
    scale: Scale
    folder: Path  # where everything goes
    candidates: Mapping[Setting, list[Candidate]]  # all arms in each setting
    selected: Mapping[Setting, list[Candidate]]  # those to run now
    rates: Mapping[str, tuple[float, ...]]  # the grid of learning rates of each optimiser


def folder_of(config: ReproduceConfig) -> Path:
    """The folder of an experiment at a scale."""
    return config.out / f"{config.name}-{config.scale}"


def scale_of(config: ReproduceConfig) -> Scale:
    """The scale, as the experiment changes it."""
    return replace(catalogue.SCALES[config.scale], **catalogue.EXPERIMENTS[config.name].scaled.get(config.scale, {}))


def with_defaults(config: ReproduceConfig) -> ReproduceConfig:
    """The options with the values of the experiment and the scale in place of those that were not given."""
    scale, remembers = scale_of(config), catalogue.EXPERIMENTS[config.name].remembers
    return replace(
        config,
        budget=None if remembers else config.budget or scale.budget,
        tuning=None if remembers else config.tuning or scale.tuning,
        steps=config.steps or scale.steps,
        optimizers=config.optimizers or (("adamw",) if remembers else tuple(catalogue.OPTIMIZERS)),
        compile=config.compile or ("off" if remembers else scale.compile),
    )


def make_plan(config: ReproduceConfig) -> Plan:
    """The runs that the options ask for. Raises LineartimeError for an unknown experiment, model, text or context."""
    config.check()
    experiment, scale = catalogue.EXPERIMENTS[config.name], scale_of(config)
    settings = experiment.settings["cpu" if config.scale == "trial" else config.scale]
    if config.scale == "trial":
        shown = settings if experiment.remembers else settings[:1]
        settings = tuple(Setting(each.text, TRIAL_CONTEXT, pairs=TRIAL_PAIRS if each.task else 0) for each in shown)
    check_among("texts", config.texts, list(dict.fromkeys(each.text for each in settings)), "a text of this experiment")
    if experiment.remembers:
        settings = _memory_settings(config, settings)
        wide = f"models with two layers that move information, {scale.memory.d_model} wide, or more for more pairs"
        scale = replace(scale, description=wide)
    arms = {arm.name: arm for arm in experiment.arms}
    seeds = max(arm.seeds for arm in arms.values())
    arms |= {item: _added_arm(item, experiment.task, seeds) for item in config.add if item not in arms}
    check_among("systems", config.systems, arms, "a model of this experiment")
    check_among("contexts", config.contexts, list({each.context: None for each in settings}), "a context of this experiment")
    config = with_defaults(config)
    candidates = {each: _candidates(config, experiment, scale, [*arms.values()], each) for each in settings}
    selected = {
        setting: [each for each in candidates[setting] if each.arm.name in (config.systems or arms)]
        for setting in settings
        if setting.context in (config.contexts or (setting.context,)) and setting.text in (config.texts or (setting.text,))
    }
    rates = {name: config.rates or scale.rates[name] for name in config.optimizers}
    return Plan(config, experiment, scale, folder_of(config), candidates, selected, rates)


def _memory_settings(config: ReproduceConfig, usual: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """The tasks to run now, at the lengths and with the pairs that the options ask for."""
    tasks = dict.fromkeys(each.task for each in usual if each.task and each.text in (config.texts or (each.text,)))
    lengths, settings = config.lengths or dict.fromkeys(each.context for each in usual), []
    for task, length in product(tasks, lengths):
        texts = TASKS[task]
        for pairs in (config.pairs or dict.fromkeys(each.pairs for each in usual)) if texts.takes_pairs else (0,):
            if length % 2 or length < texts.shortest(pairs):
                least = f"an even number of at least {texts.shortest(pairs)} for {task}"
                raise ArgumentError("lengths", f"has {length}, but must be {least}{f' of {pairs}' if pairs else ''}.")
            settings.append(Setting(task, length, pairs=pairs))
    return tuple(settings)


def _added_arm(item: str, task: Task, seeds: int) -> Arm:
    """The arm of NAME or NAME:OPTION=VALUE, where there may be several options."""
    system, *override = item.split(":")
    if f"{system}-tiny" not in PRESETS:
        problem = f"has {item!r}, but {system!r} is no system{did_you_mean(system, SYSTEMS)}"
        raise ArgumentError(
            "add", f"{problem}: use one that `lineartime presets` lists, or import the module that registers it."
        )
    try:
        arm = Arm(item, system, dict(map(read_override, override)), seeds)
        reason = next((mixer.why_not_causal for mixer in SYSTEMS[system].mixers if mixer.why_not_causal), None)
        if task != "mlm" and reason is not None:
            raise ArgumentError("system", f"is {system}, which cannot be causal: {reason}.")
        for name in ("task", "vocab_size", "d_model", "max_positions"):
            if name in arm.override:
                raise ArgumentError(name, "is the same, or follows from the parameters, for all systems: leave it out.")
        SYSTEMS[system].model(SIZES["tiny"], task, **arm.override)
    except ArgumentError as error:
        raise ArgumentError("add", f"has {item!r}, but {error}") from None
    return arm


def _candidates(
    config: ReproduceConfig, experiment: Experiment, scale: Scale, arms: list[Arm], setting: Setting
) -> list[Candidate]:
    """All arms in a setting, with as many parameters as the first."""
    found: list[Candidate] = []
    shared: dict[str, Any] = {"precision": config.precision, "device": config.device, "compile": config.compile, "track": []}
    data = () if setting.task else getattr(config, setting.text) or config.data
    shared |= {"tokenizer": scale.tokenizer, "data": list(data)}
    shared["cache"] = None if config.cache is None else str(config.cache)
    if config.threads is not None:
        shared["threads"] = config.threads
    size = _wide_enough(scale.memory, setting.pairs) if setting.task else scale.size
    if setting.width:
        size = replace(size, d_model=setting.width, n_heads=setting.width * size.n_heads // size.d_model)
    vocab_size = TASKS[setting.task].vocab_size(setting.pairs) if setting.task else scale.vocab_size
    for arm in arms:
        folder = folder_of(config) / setting.label / re.sub(r"[ :]", "-", arm.name).replace("/", "-over-")
        usual = {name: value for name, value in experiment.override.items() if name not in SYSTEMS[arm.system].fields}
        made = replace(arm, override=usual | dict(arm.override))
        model = model_at(made, size, experiment.task, setting, vocab_size, found[0].parameters if found else None)
        options = {**training_options(arm, model), **shared}
        found.append(Candidate(arm, setting, model, options, folder, parameters_of(model)))
    return found


def model_at(arm: Arm, size: Size, task: Task, setting: Setting, vocab_size: int, target: int | None) -> ModelConfig:
    """The model of an arm at a size, with as many learned positions as the context has tokens.

    Unless its parameters are within 3 % of the target, its width becomes the one that brings them nearest.
    """
    config = SYSTEMS[arm.system].model(size, task, vocab_size=vocab_size, **arm.override)
    if config.max_positions is not None:
        config = config.override(max_positions=setting.context)
    if target is None or abs(parameters_of(config) - target) <= TOLERANCE * target:
        return config
    parts = [mixer.options.get(name, 1) for mixer in config.mixers for name in ("n_heads", "n_nets")]
    unit = 2 * math.lcm(size.n_heads, *parts)  # an even number of features for each head
    middle = size.d_model * (target / parameters_of(config)) ** 0.5 / unit
    models = [config.override(d_model=unit * max(1, int(middle) + nearby)) for nearby in (-1, 0, 1, 2)]
    return min(models, key=lambda model: abs(parameters_of(model) - target))


def _wide_enough(size: Size, pairs: int) -> Size:
    """A size at which pairs can be recalled: keys are linear maps of tokens, of which d_model are independent at most."""
    width = 64 * -(-pairs // 64) if pairs > min(size.d_model, size.d_qk) else 0
    return replace(size, d_model=max(size.d_model, width), d_qk=max(size.d_qk, width))


def training_options(arm: Arm, config: ModelConfig) -> dict[str, Any]:
    """The preset and the overrides that make a model, as options of training."""
    preset = f"{arm.system}-tiny"
    usual = resolve(preset, config.task).values
    usual["vocab_size"] = config.vocab_size  # which follows from the tokenizer
    different = {name: value for name, value in config.values.items() if name not in usual or usual[name] != value}
    return {"preset": preset, "task": config.task, "override": written(different)}


def plan_options(config: ReproduceConfig) -> dict[str, Any]:
    """The options on which runs depend."""
    return {name: getattr(config, name) for name in PLAN_OPTIONS}


def with_saved_options(config: ReproduceConfig) -> ReproduceConfig:
    """Complete the options with those of the runs in the folder. Raises ArgumentError if a given one differs."""
    file = folder_of(config) / PLAN_FILE
    if not file.exists():
        return config
    usual, values = ReproduceConfig(), dict(vars(config))
    advice = "restore it from a copy, or delete it if all runs beside it were made with the current options"
    for name, found in plan_options(read_file(file, ReproduceConfig, advice)).items():
        if name == "add":  # others can join the comparison later
            values[name] = tuple(dict.fromkeys([*found, *values[name]]))
        elif values[name] == getattr(usual, name):
            values[name] = found
        elif values[name] != found:
            there = f"the runs in {file.parent} were made with {shown_option(found)}: use that, or give another "
            raise ArgumentError(name, f"is {shown_option(values[name])}, but {there}`out`.")
    return ReproduceConfig(**values)


def with_device(config: ReproduceConfig) -> ReproduceConfig:
    """Replace "auto" by the device and the precision that it means on this machine, so that no other continues in another one.

    Raises ArgumentError if there is no such device.
    """
    device = choose_device(config.device)
    return replace(config, device=cast("Device", device.type), precision=choose_precision(config.precision, device))
