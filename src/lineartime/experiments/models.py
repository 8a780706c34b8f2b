"""The models of an experiment: their sizes, and parameters within 3 % of each other."""

from functools import cache
from typing import Any

from lineartime.choices import Task
from lineartime.experiments.definitions import Arm, Setting
from lineartime.models.config import ModelConfig
from lineartime.models.cost import count_parameters
from lineartime.models.presets import model_of, resolve, values_of
from lineartime.models.systems import SYSTEMS, Size
from lineartime.training.overrides import written

TOLERANCE = 0.03
"""The largest allowed relative difference of a model's number of parameters from the first one's."""

count_parameters_cached = cache(count_parameters)
"""The number of parameters of a model."""


def model_at(arm: Arm, size: Size, task: Task, setting: Setting, vocab_size: int) -> ModelConfig:
    """The model of an arm at a size, with as many learned positions as the context has tokens."""
    config = model_of(SYSTEMS[arm.system], size, task).override(vocab_size=vocab_size, **arm.override)
    return config if config.max_positions is None else config.override(max_positions=setting.context)


def match_parameters(config: ModelConfig, size: Size, target: int) -> ModelConfig:
    """A model with the width that brings its parameters nearest to a target, if they are not within 3 % of it."""
    if abs(count_parameters_cached(config) - target) <= TOLERANCE * target:
        return config
    unit = 2 * size.n_heads  # an even number of features for each head
    middle = size.d_model * (target / count_parameters_cached(config)) ** 0.5 / unit
    models = [config.override(d_model=unit * max(1, int(middle) + nearby)) for nearby in (-1, 0, 1, 2)]
    return min(models, key=lambda model: abs(count_parameters_cached(model) - target))


def paper_preset(arm: Arm, setting: Setting) -> str:
    """The preset of an arm at the scale `paper`."""
    return arm.paper_preset.replace("{size}", setting.size) or f"{arm.system}-base"


def training_options(arm: Arm, config: ModelConfig) -> dict[str, Any]:
    """The preset and the overrides that make a model, as options of training."""
    preset = f"{arm.system}-tiny"
    usual = values_of(resolve(preset, config.task))
    different = {name: value for name, value in values_of(config).items() if usual[name] != value and name != "vocab_size"}
    return {"preset": preset, "task": config.task, "override": written(different)}
