"""The runs of an experiment: which models in which settings, and the options of training of each run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lineartime.choices import Task
from lineartime.errors import ArgumentError, Call, did_you_mean
from lineartime.experiments import catalogue
from lineartime.experiments.config import ReproduceConfig, check_among
from lineartime.experiments.definitions import Arm, Experiment, FinalTest, Scale, Setting
from lineartime.experiments.models import count_parameters_cached, match_parameters, model_at, paper_preset, training_options
from lineartime.models.config import ModelConfig
from lineartime.models.presets import PRESETS, TINY, model_of, resolve
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig
from lineartime.training.overrides import merged_override, read_override, written
from lineartime.training.recipes import recipe_config

JobKind = Literal["speed", "tune", "run", "latency"]
TRIAL_CONTEXT = 64
LATENCY_TOKENS = 8192
"""The tokens of a step whose time is measured: one sequence of the longest context of the scale `cpu`."""
PAPER_CORES = 64
"""The number of TPU cores on which the paper trains. Each clips the gradient of its own tokens."""


@dataclass(frozen=True)
class Job:
    """One process: a run to train, or a measurement of latency.

    Attributes:
        folder: where it leaves its files.
        kind: speed, a few steps to measure how fast a model trains; tune, a short run with one learning rate; run; latency.
        options: of training, or of the benchmark, as values for JSON.
        tests: to measure at the end.
        seconds: of training that are planned; None if the steps are given.
    """

    folder: Path
    kind: JobKind
    options: Mapping[str, Any]
    tests: tuple[FinalTest, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Entry:
    """An arm in a setting.

    Attributes:
        arm: the model's name and system.
        setting: where it is compared.
        model: at the vocabulary of its text.
        options: of training, those of all its runs.
        folder: of its runs.
    """

    arm: Arm
    setting: Setting
    model: ModelConfig
    options: Mapping[str, Any] = field(repr=False)
    folder: Path

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return count_parameters_cached(self.model)


@dataclass(frozen=True)
class Plan:
    """An experiment at a scale with all its runs.

    Attributes:
        config: the options.
        experiment, scale: what the options name.
        entries: setting by setting, each with all arms.
    """

    config: ReproduceConfig
    experiment: Experiment
    scale: Scale
    entries: tuple[Entry, ...]

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return folder_of(self.config)

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned."""
        return self.config.scale != "paper"

    @property
    def optimizers(self) -> tuple[str, ...]:
        """The names of the optimisers that are tuned."""
        return (self.config.optimizers or tuple(catalogue.OPTIMIZERS)) if self.tunes else ("adamw",)

    @property
    def budget(self) -> float | None:
        """Seconds of training of a run; None if its steps are given."""
        return self.config.budget or self.experiment.budget.get(self.config.scale, self.scale.budget)

    @property
    def tuning(self) -> float | None:
        """Seconds of training of a run that tries a rate; None if none is tried."""
        return self.config.tuning or self.experiment.tuning.get(self.config.scale, self.scale.tuning)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings, in order."""
        return tuple(dict.fromkeys(entry.setting for entry in self.entries))

    def entries_of(self, setting: Setting) -> list[Entry]:
        """The arms in a setting."""
        return [entry for entry in self.entries if entry.setting == setting]

    def seeds(self, arm: Arm) -> int:
        """How many seeds of an arm belong to the experiment."""
        return arm.seeds if self.tunes else 1

    def seeds_now(self, arm: Arm) -> int:
        """How many seeds of an arm to train now."""
        return self.config.seeds or self.seeds(arm)

    def is_selected(self, entry: Entry) -> bool:
        """Whether the options ask to run an arm in a setting now."""
        chosen = self.config
        return (
            (not chosen.systems or entry.arm.name in chosen.systems)
            and (not chosen.contexts or entry.setting.context in chosen.contexts)
            and (not chosen.texts or entry.setting.text in chosen.texts)
        )

    def rates(self, optimizer: str) -> tuple[float, ...]:
        """The grid of learning rates of an optimiser."""
        return self.config.rates or catalogue.OPTIMIZERS[optimizer].rates[self.config.scale]

    def speed_job(self, entry: Entry, optimizer: str, number: int = 0) -> Job:
        """The job that measures how fast an entry trains, in one of the rounds."""
        steps = self.scale.speed_steps
        rates = self.rates(optimizer)
        options = self._training(entry, optimizer, rates[len(rates) // 2], 0, steps) | {"eval_every": steps, "eval_windows": 1}
        return Job(entry.folder / f"{optimizer}-speed-{number}", "speed", options)

    def tuning_job(self, entry: Entry, optimizer: str, rate: float, steps: int | None = None) -> Job:
        """The job that tries a learning rate; incomplete without its steps, which the speed decides."""
        options = self._training(entry, optimizer, rate, 0, steps) | {"eval_every": steps}
        return Job(entry.folder / f"{optimizer}-tune-{rate:g}", "tune", options, seconds=self.tuning)

    def final_job(self, entry: Entry, optimizer: str, seed: int, rate: float | None = None, steps: int | None = None) -> Job:
        """The job of a whole run; incomplete without the rate and the steps, which trials and the speed decide."""
        name = f"{optimizer}-seed-{seed}" if self.experiment.each_optimizer else f"seed-{seed}"
        folder = entry.folder / name
        if not self.tunes:
            return Job(folder, "run", {**entry.options, "seed": seed}, self.experiment.tests)
        return Job(folder, "run", self._training(entry, optimizer, rate, seed, steps), self.experiment.tests, self.budget)

    def final_optimizers(self, chosen: str) -> tuple[str, ...]:
        """The optimisers to train in full: the `chosen` one, or all."""
        return self.optimizers if self.experiment.each_optimizer else (chosen,)

    def tokens_per_step(self, entry: Entry) -> int:
        """The tokens of a step of training, if rates are tuned."""
        return max(self.scale.tokens_per_batch, entry.setting.context)

    def latency_job(self, setting: Setting) -> Job:
        """The job that measures all arms at a context."""
        options: dict[str, Any] = {
            "presets": [str(entry.options["preset"]) for entry in self.entries_of(setting)],
            "override": [
                f"{entry.options['preset']}.{item}" for entry in self.entries_of(setting) for item in entry.options["override"]
            ],
            "context_lengths": [setting.context],
            "vocab_size": self.entries_of(setting)[0].model.vocab_size,
            "measure": ["train"],
            "tokens_per_batch": max(self.scale.tokens_per_batch, LATENCY_TOKENS) if self.tunes else LATENCY_TOKENS,
            "modes": ["compiled" if self.compile == "on" else "eager"],
            "dtypes": [self.config.precision],
            "memory": False,
            "device": self.config.device,
            "threads": self.config.threads,
        }
        return Job(self.folder / setting.label, "latency", options)

    @property
    def compile(self) -> Literal["auto", "on", "off"]:
        """Whether models are compiled."""
        return self.config.compile or self.scale.compile

    def _training(self, entry: Entry, optimizer: str, rate: float | None, seed: int, steps: int | None) -> dict[str, Any]:
        context, scale = entry.setting.context, self.scale
        assert scale.tokens_at_once is not None  # the scale tunes
        return {
            **entry.options,
            **catalogue.OPTIMIZERS[optimizer].options,
            "context_length": context,
            "tokens_per_batch": self.tokens_per_step(entry),
            "batch_size": max(1, scale.tokens_at_once // context),
            "learning_rate": rate,
            "steps": steps,
            "seed": seed,
            "eval_every": None if steps is None else max(1, -(-steps // scale.evaluations)),
            "eval_windows": max(1, scale.validation_tokens // context),
            "compile": self.compile,
        }


def folder_of(config: ReproduceConfig) -> Path:
    """The folder of an experiment at a scale."""
    return config.out / f"{config.name}-{config.scale}"


def make_plan(config: ReproduceConfig) -> Plan:
    """The runs that the options ask for. Raises LineartimeError for an unknown experiment, model, text or context."""
    config.check()
    experiment, scale = catalogue.experiment_of(config.name), catalogue.SCALES[config.scale]
    scale = replace(scale, tokenizer=experiment.tokenizer.get(config.scale, scale.tokenizer))
    settings = experiment.settings["cpu"][:1] if config.scale == "trial" else experiment.settings[config.scale]
    if config.scale == "trial":
        settings = tuple(Setting(setting.text, TRIAL_CONTEXT) for setting in settings)
    if not settings:
        raise ArgumentError(
            "name", f"is {config.name}, which the paper does not contain: use another scale than {config.scale}."
        )
    arms = [arm for arm in experiment.arms if config.scale in arm.scales]
    if config.add and experiment.kind == "latency":
        raise ArgumentError("add", "is given, but this experiment measures all its models together: use ", Call("bench"), ".")
    seeds = max(arm.seeds for arm in arms)
    known = {arm.name for arm in arms}
    arms += [_added_arm(item, experiment.task, seeds) for item in dict.fromkeys(config.add) if item not in known]
    check_among("systems", config.systems, tuple(arm.name for arm in arms), "model of this experiment")
    if config.systems and experiment.kind == "latency":
        given = " ".join(config.systems)
        raise ArgumentError(
            "systems", f"is {given}, but this experiment measures all models of a context together: leave it out."
        )
    check_among(
        "contexts", config.contexts, tuple(dict.fromkeys(each.context for each in settings)), "context of this experiment"
    )
    check_among("texts", config.texts, tuple(dict.fromkeys(each.text for each in settings)), "text of this experiment")
    entries = tuple(_entries(config, experiment, scale, arms, settings))
    names: dict[Path, str] = {}
    for entry in entries:
        other = names.setdefault(entry.folder, entry.arm.name)
        if other != entry.arm.name:
            raise ArgumentError(
                "add", f"has {entry.arm.name!r}, whose folder would be that of {other!r}: write one of them otherwise."
            )
    return Plan(config, experiment, scale, entries)


def _added_arm(item: str, task: Task, seeds: int) -> Arm:
    """The arm of NAME or NAME:OPTION=VALUE, where there may be several options."""
    system, *override = item.split(":")
    if f"{system}-tiny" not in PRESETS:
        like = did_you_mean(system, SYSTEMS)
        problem = f"has {item!r}, but {system!r} is no system{like}"
        raise ArgumentError("add", f"{problem}: use one of ", Call("presets"), ", or import the module that registers it.")
    try:
        arm = Arm(item, system, dict(map(read_override, override)), seeds)
        reason = SYSTEMS[system].mixer.why_not_causal
        if task != "mlm" and reason is not None:
            raise ArgumentError("system", f"is {system}, which cannot be causal: {reason}.")
        for name in [name for name in ("task", "vocab_size", "d_model", "max_positions") if name in arm.override]:
            raise ArgumentError(name, "is the same, or follows from the parameters, for all systems: leave it out.")
        model_of(SYSTEMS[system], TINY, task).override(**arm.override)
    except ArgumentError as error:
        raise ArgumentError("add", f"has {item!r}, but {error}") from None
    return arm


def _entries(
    config: ReproduceConfig, experiment: Experiment, scale: Scale, arms: list[Arm], settings: tuple[Setting, ...]
) -> Iterator[Entry]:
    running = {name: getattr(config, name) for name in ("precision", "device", "threads")}
    running = {name: value for name, value in running.items() if value is not None}
    running |= {"compile": config.compile or scale.compile}
    running |= {"cache": None if config.cache is None else str(config.cache), "track": []}
    for setting in settings:
        data = {"data": list(getattr(config, setting.text) or config.data)}
        target: int | None = None
        for arm in arms:
            folder = folder_of(config) / setting.label / re.sub(r"[ :]", "-", arm.name).replace("/", "-over-")
            if config.scale == "paper":
                options, model = _of_paper(experiment, arm, setting)
                yield Entry(arm, setting, model, {**options, **running, **(data if data["data"] else {})}, folder)
                continue
            size = scale.sizes.get(setting.size, scale.sizes["main"])
            model = model_at(arm, size, experiment.task, setting, scale.vocab_size)
            target = target or count_parameters_cached(model)
            model = match_parameters(model, size, target)
            options = {**training_options(arm, model), "tokenizer": scale.tokenizer, **running, **data}
            yield Entry(arm, setting, model, options, folder)


def _of_paper(experiment: Experiment, arm: Arm, setting: Setting) -> tuple[dict[str, Any], ModelConfig]:
    """The recipe of the paper for an arm, and its model with the recipe's vocabulary."""
    recipe = recipe_config(experiment.recipe, paper_preset(arm, setting))
    usual = resolve(recipe.preset, experiment.task)
    context = {} if usual.max_positions is None else {"max_positions": setting.context}
    items = list(merged_override(recipe.override, written(context | _published(usual, setting)), written(arm.override)))
    # Without the name of the recipe: `train` would apply its values again in place of options that equal the defaults.
    options = {**recipe.to_dict(), "recipe": None, "context_length": setting.context, "override": items}
    if recipe.clips_locally:
        options["clip_tokens"] = max(catalogue.SCALES["paper"].tokens_per_batch // PAPER_CORES, setting.context)
    model = TrainConfig.from_dict({**options, "data": None}).model_config(usual.vocab_size)
    return options, model


def _published(model: ModelConfig, setting: Setting) -> dict[str, Any]:
    """Options that divide scores as published; the presets divide by the number of visible keys."""
    known = model.mixer.options
    if "normalization" not in known:
        return {}
    published: dict[str, Any] = {"normalization": "paper"}
    if "max_length" in known:  # the constant n; up to 512 tokens, it also makes the relative bias a table
        published["max_length"] = setting.context
    return published
