"""The runs of an experiment: which models in which settings, the options of each run, and the folder that holds them."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

from lineartime.choices import Device, MemoryTask, Task
from lineartime.errors import ArgumentError, did_you_mean
from lineartime.experiments import catalogue
from lineartime.experiments.catalogue import Arm, Experiment, FinalTest, Job, Scale, Setting
from lineartime.experiments.config import TEXT_OPTIONS, ReproduceConfig, check_among, shown_option
from lineartime.experiments.memory_tasks import TASKS
from lineartime.files import read_file, write_file
from lineartime.machine import choose_device, choose_precision
from lineartime.models.config import ModelConfig
from lineartime.models.cost import count_parameters
from lineartime.models.systems import PRESETS, SIZES, SYSTEMS, Size, resolve
from lineartime.training.config import TrainConfig, merged_override, read_override, recipe_config, written

PLAN_FILE = "plan.json"
PLAN_OPTIONS = (
    *(*TEXT_OPTIONS, "budget", "tuning", "optimizers", "compile", "precision", "threads", "rates", "device", "add"),
    *("steps", "longer"),  # of memory
)
"""The options on which runs depend, besides the experiment and the scale, which name the folder."""
TRIAL_CONTEXT, TRIAL_PAIRS = 64, 4
MEMORY_TRAINING = {"beta2": 0.98, "weight_decay": 0.1}
"""Options of training on tasks: with them, small models leave chance sooner than with those of language models."""
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where a needle is in the tests."""
LATENCY_TOKENS = 8192
"""The tokens of a step whose time is measured: one sequence of the longest context of the scale `cpu`."""
TOLERANCE = 0.03
"""The largest allowed relative difference of a model's number of parameters from the first one's."""
_PAPER_TOKENS, _PAPER_CORES = 2**18, 64
"""The tokens of a step in the paper, and the TPU cores on which it trains. Each clips the gradient of its own tokens."""

parameters_of = cache(count_parameters)
"""The number of parameters of a model."""


@dataclass(frozen=True)
class Candidate:
    """An arm in a setting: its model at the vocabulary of the text, and the options and the folder of all its runs."""

    arm: Arm
    setting: Setting
    model: ModelConfig
    options: Mapping[str, Any] = field(repr=False)
    folder: Path

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return parameters_of(self.model)


@dataclass(frozen=True)
class Plan:
    """An experiment at a scale with all its runs."""

    config: ReproduceConfig  # with defaults of the experiment and the scale
    experiment: Experiment
    scale: Scale
    candidates: tuple[Candidate, ...]  # setting by setting, each with all arms
    asked: tuple[Setting, ...]  # those to run now

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return folder_of(self.config)

    @property
    def tunes(self) -> bool:
        """Whether learning rates are tuned."""
        return self.config.scale != "paper"

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings, in order."""
        return tuple(dict.fromkeys(each.setting for each in self.candidates))

    def candidates_of(self, setting: Setting) -> list[Candidate]:
        """The arms in a setting."""
        return [each for each in self.candidates if each.setting == setting]

    def selected(self, setting: Setting) -> list[Candidate]:
        """The arms in a setting that the options ask to run now."""
        candidates = self.candidates_of(setting) if setting in self.asked else []
        return [each for each in candidates if not self.config.systems or each.arm.name in self.config.systems]

    def seeds(self, arm: Arm) -> int:
        """How many seeds of an arm belong to the experiment."""
        return arm.seeds if self.tunes else 1

    def rates(self, optimizer: str) -> tuple[float, ...]:
        """The grid of learning rates of an optimiser."""
        return self.config.rates or catalogue.OPTIMIZERS[optimizer].rates[self.config.scale]

    def tokens_per_step(self, setting: Setting) -> int:
        """The tokens of a step of training, if rates are tuned."""
        return max(self.scale.tokens_per_batch, setting.context)

    def speed_job(self, candidate: Candidate, optimizer: str, number: int = 0) -> Job:
        """The job that measures how fast a model trains, in one of the rounds."""
        steps, rates = self.scale.speed_steps, self.rates(optimizer)
        options = self._training(candidate, optimizer, rates[len(rates) // 2], 0, steps)
        return Job(
            candidate.folder / f"{optimizer}-speed-{number}", "speed", options | {"eval_every": steps, "eval_windows": 1}
        )

    def tuning_job(self, candidate: Candidate, optimizer: str, rate: float, steps: int | None = None) -> Job:
        """The job that tries a learning rate; incomplete without its steps, which the speed decides."""
        options = self._training(candidate, optimizer, rate, 0, steps) | {"eval_every": steps}
        return Job(candidate.folder / f"{optimizer}-tune-{rate:g}", "tune", options, seconds=self.config.tuning)

    def final_job(
        self, candidate: Candidate, optimizer: str, seed: int, rate: float | None = None, steps: int | None = None
    ) -> Job:
        """The job of a whole run; incomplete without the rate and the steps, which trials and the speed decide."""
        folder, tests = candidate.folder / f"seed-{seed}", self.experiment.tests
        if not self.tunes:
            return Job(folder, "run", {**candidate.options, "seed": seed}, tests)
        options = self._training(candidate, optimizer, rate, seed, steps)
        return Job(folder, "run", options, tests, self.scale.test_tokens, self.config.budget)

    def memory_job(self, candidate: Candidate, rate: float, seed: int) -> Job:
        """The run of a model on the task of its setting."""
        setting, config, scale = candidate.setting, self.config, self.scale
        options = self._training(candidate, config.optimizers[0], rate, seed, config.steps) | MEMORY_TRAINING
        folder = candidate.folder / f"rate-{rate:g}-seed-{seed}"
        longer = {"": 1} | {f"at {times} times the length": times for times in config.longer}
        tests = [FinalTest(name, times) for name, times in longer.items()]
        for depth in DEPTHS if setting.task == "needle" else ():
            tests += [FinalTest(f"depth {depth:.0%} {name}".strip(), times, depth=depth) for name, times in longer.items()]
        return Job(folder, "memory", options, tuple(tests), scale.test_tokens, setting=setting)

    def _training(
        self, candidate: Candidate, optimizer: str, rate: float | None, seed: int, steps: int | None
    ) -> dict[str, Any]:
        context, scale = candidate.setting.context, self.scale
        assert scale.tokens_at_once is not None  # the scale tunes
        return {
            **candidate.options,
            **catalogue.OPTIMIZERS[optimizer].options,
            "context_length": context,
            "tokens_per_batch": self.tokens_per_step(candidate.setting),
            "batch_size": max(1, scale.tokens_at_once // context),
            "learning_rate": rate,
            "steps": steps,
            "seed": seed,
            "eval_every": None if steps is None else max(1, -(-steps // scale.evaluations)),
            "eval_windows": max(1, scale.validation_tokens // context),
        }

    def latency_job(self, setting: Setting) -> Job:
        """The job that measures all arms at a context, by the options of a benchmark."""
        config, candidates = self.config, self.candidates_of(setting)
        options: dict[str, Any] = {
            "presets": [each.options["preset"] for each in candidates],
            "override": [f"{each.options['preset']}.{item}" for each in candidates for item in each.options["override"]],
            "context_lengths": [setting.context],
            "vocab_size": candidates[0].model.vocab_size,
            "measure": ["train"],
            "tokens_per_batch": max(self.scale.tokens_per_batch, LATENCY_TOKENS) if self.tunes else LATENCY_TOKENS,
            "modes": ["compiled" if config.compile == "on" else "eager"],
            "dtypes": [config.precision],
            "memory": False,
            "device": config.device,
            "threads": config.threads,
        }
        return Job(self.folder / setting.label, "latency", options)


def folder_of(config: ReproduceConfig) -> Path:
    """The folder of an experiment at a scale."""
    return config.out / f"{config.name}-{config.scale}"


def with_defaults(config: ReproduceConfig) -> ReproduceConfig:
    """The options with the values of the experiment and the scale in place of those that were not given."""
    experiment, scale = catalogue.EXPERIMENTS[config.name], catalogue.SCALES[config.scale]
    if experiment.kind == "memory":
        return replace(
            config,
            steps=config.steps or experiment.steps.get(config.scale),
            rates=config.rates or experiment.rates.get(config.scale, ()),
            optimizers=config.optimizers or ("adamw",),
            compile=config.compile or "off",
        )
    return replace(
        config,
        budget=config.budget or experiment.budget.get(config.scale, scale.budget),
        tuning=config.tuning or experiment.tuning.get(config.scale, scale.tuning),
        optimizers=("adamw",) if config.scale == "paper" else config.optimizers or tuple(catalogue.OPTIMIZERS),
        compile=config.compile or scale.compile,
    )


def make_plan(config: ReproduceConfig) -> Plan:
    """The runs that the options ask for. Raises LineartimeError for an unknown experiment, model, text or context."""
    config.check()
    experiment, scale = catalogue.EXPERIMENTS[config.name], catalogue.SCALES[config.scale]
    scale = replace(scale, tokenizer=experiment.tokenizer.get(config.scale, scale.tokenizer))
    settings = experiment.settings["cpu" if config.scale == "trial" else config.scale]
    if config.scale == "trial":
        shown = settings if experiment.kind == "memory" else settings[:1]
        settings = tuple(Setting(each.text, TRIAL_CONTEXT, task=each.task, pairs=TRIAL_PAIRS) for each in shown)
    if not settings:
        raise ArgumentError(
            "name", f"is {config.name}, which the paper does not contain: use another scale than {config.scale}."
        )
    if experiment.kind == "memory":
        settings, width = _memory_settings(config, settings), scale.sizes.get("memory", scale.sizes["main"]).d_model
        scale = replace(
            scale, description=f"models with two layers that move information, {width} wide, or more for more pairs"
        )
    if config.add and experiment.kind == "latency":
        raise ArgumentError("add", "is given, but this experiment measures all its models together: use `bench()`.")
    arms = {arm.name: arm for arm in experiment.arms if config.scale in arm.scales}
    seeds = max(arm.seeds for arm in arms.values())
    arms |= {item: _added_arm(item, experiment.task, seeds) for item in config.add if item not in arms}
    check_among("systems", config.systems, tuple(arms), "a model of this experiment")
    if config.systems and experiment.kind == "latency":
        given = " ".join(config.systems)
        raise ArgumentError(
            "systems", f"is {given}, but this experiment measures all models of a context together: leave it out."
        )
    check_among("contexts", config.contexts, tuple({each.context: None for each in settings}), "a context of this experiment")
    check_among("texts", config.texts, tuple({each.text: None for each in settings}), "a text of this experiment")
    config = with_defaults(config)
    asked = tuple(
        each
        for each in settings
        if each.context in (config.contexts or (each.context,)) and each.text in (config.texts or (each.text,))
    )
    if experiment.kind == "memory":
        settings = tuple(dict.fromkeys((*settings, *_settings_there(config))))
    return Plan(config, experiment, scale, tuple(_candidates(config, experiment, scale, [*arms.values()], settings)), asked)


def _memory_settings(config: ReproduceConfig, usual: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """The tasks at the lengths and with the pairs that the options ask for."""
    tasks = config.tasks or dict.fromkeys(each.task for each in usual if each.task)
    lengths, settings = config.lengths or dict.fromkeys(each.context for each in usual), []
    for task, length in product(tasks, lengths):
        texts = TASKS[task]
        for pairs in (config.pairs or dict.fromkeys(each.pairs for each in usual)) if texts.takes_pairs else (0,):
            if length % 2 or length < texts.shortest(pairs):
                least = f"an even number of at least {texts.shortest(pairs)} for {task}"
                raise ArgumentError("lengths", f"has {length}, but must be {least}{f' of {pairs}' if pairs else ''}.")
            settings.append(Setting("books", length, "memory", task, pairs))
    return tuple(settings)


def _settings_there(config: ReproduceConfig) -> Iterator[Setting]:
    """The settings of tasks that have a folder already."""
    for folder in sorted(folder_of(config).glob("*-*/")):
        if found := re.fullmatch(rf"({'|'.join(TASKS)})-(\d+)(?:-(\d+))?", folder.name):
            yield Setting("books", int(found[2]), "memory", cast("MemoryTask", found[1]), int(found[3] or 0))


def _added_arm(item: str, task: Task, seeds: int) -> Arm:
    """The arm of NAME or NAME:OPTION=VALUE, where there may be several options."""
    system, *override = item.split(":")
    if f"{system}-tiny" not in PRESETS:
        problem = f"has {item!r}, but {system!r} is no system{did_you_mean(system, SYSTEMS)}"
        raise ArgumentError("add", f"{problem}: use one of `presets()`, or import the module that registers it.")
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
    config: ReproduceConfig, experiment: Experiment, scale: Scale, arms: list[Arm], settings: tuple[Setting, ...]
) -> Iterator[Candidate]:
    running: dict[str, Any] = {"precision": config.precision, "device": config.device, "compile": config.compile, "track": []}
    running["cache"] = None if config.cache is None else str(config.cache)
    if config.threads is not None:
        running["threads"] = config.threads
    for setting in settings:
        data = list(getattr(config, setting.text) or config.data)
        target: int | None = None
        for arm in arms:
            folder = folder_of(config) / setting.label / re.sub(r"[ :]", "-", arm.name).replace("/", "-over-")
            if config.scale == "paper":
                options, model = paper_model(experiment, arm, setting)
                own: dict[str, Any] = {"data": data} if data else {}
            else:
                size = wide_enough(scale.sizes.get(setting.size, scale.sizes["main"]), setting.pairs)
                vocab_size = TASKS[setting.task].vocab_size(setting.pairs) if setting.task else scale.vocab_size
                usual = {name: value for name, value in experiment.override.items() if name not in SYSTEMS[arm.system].fields}
                made = replace(arm, override=usual | dict(arm.override))
                model = model_at(made, size, experiment.task, setting, vocab_size, target)
                target = target or parameters_of(model)
                options, own = training_options(arm, model), {"tokenizer": scale.tokenizer, "data": data}
            yield Candidate(arm, setting, model, {**options, **running, **own}, folder)


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


def wide_enough(size: Size, pairs: int) -> Size:
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


def paper_model(experiment: Experiment, arm: Arm, setting: Setting) -> tuple[dict[str, Any], ModelConfig]:
    """The options of training of an arm in the paper's recipe, and its model with the recipe's vocabulary.

    Scores are divided as published; the presets divide them by the number of visible keys.
    """
    preset = arm.paper_preset.replace("{system}", arm.system).replace("{size}", setting.size)
    recipe = recipe_config(experiment.recipe, preset)
    usual = resolve(recipe.preset, experiment.task)
    published: dict[str, Any] = {} if usual.max_positions is None else {"max_positions": setting.context}
    known = usual.override_names
    if "normalization" in known:
        published["normalization"] = "paper"
        if "max_length" in known:  # the constant n; up to 512 tokens, it also makes the relative bias a table
            published["max_length"] = setting.context
    items = list(merged_override(recipe.override, written(published), written(arm.override)))
    # Without the name of the recipe: `train` would apply its values again in place of options that equal the defaults.
    options = {**recipe.to_dict(), "recipe": None, "context_length": setting.context, "override": items}
    if recipe.clips_locally:
        options["clip_tokens"] = max(_PAPER_TOKENS // _PAPER_CORES, setting.context)
    return options, TrainConfig.from_dict({**options, "data": None}).model_config(usual.vocab_size)


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

    Raises:
        ArgumentError: if there is no such device.
    """
    device = choose_device(config.device)
    return replace(config, device=cast("Device", device.type), precision=choose_precision(config.precision, device))


def write_plan(plan: Plan) -> None:
    """Write the options on which the runs depend."""
    write_file(plan.folder / PLAN_FILE, json.dumps(plan_options(plan.config), indent=1) + "\n")
