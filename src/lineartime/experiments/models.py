"""The models of an experiment: their sizes, parameters within 3 % of each other, the paper's recipes, and other chunk sizes."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lineartime.choices import Task
from lineartime.experiments.definitions import Arm, Experiment, Setting
from lineartime.models.config import ModelConfig
from lineartime.models.cost import count_parameters
from lineartime.models.language_model import LanguageModel, build_model
from lineartime.models.presets import model_of, resolve, values_of
from lineartime.models.systems import SYSTEMS, Size
from lineartime.training.config import TrainConfig, merged_override, recipe_config, written

TOLERANCE = 0.03
"""The largest allowed relative difference of a model's number of parameters from the first one's."""
_PAPER_TOKENS, _PAPER_CORES = 2**18, 64
"""The tokens of a step in the paper, and the TPU cores on which it trains. Each clips the gradient of its own tokens."""

parameters_of = cache(count_parameters)
"""The number of parameters of a model."""


def model_at(arm: Arm, size: Size, task: Task, setting: Setting, vocab_size: int, target: int | None) -> ModelConfig:
    """The model of an arm at a size, with as many learned positions as the context has tokens.

    Unless its parameters are within 3 % of the target, its width becomes the one that brings them nearest.
    """
    config = model_of(SYSTEMS[arm.system], size, task, vocab_size=vocab_size, **arm.override)
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
    usual = values_of(resolve(preset, config.task))
    usual["vocab_size"] = config.vocab_size  # which follows from the tokenizer
    different = {name: value for name, value in values_of(config).items() if name not in usual or usual[name] != value}
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


def with_chunk_size(model: LanguageModel, chunk_size: int) -> LanguageModel | None:
    """A copy of a trained model of FLASH that reads chunks of another size; None if its relative bias does not allow it.

    A table of biases keeps those of the distances that both sizes have; distances that training did not see get zero. Beyond
    512 tokens the bias is of another form, which cannot be made from a table.
    """
    other = build_model(model.config.override(chunk_size=chunk_size)).to(next(model.parameters()).device)
    weights, wanted = model.state_dict(), other.state_dict()
    if weights.keys() != wanted.keys():
        return None
    for name, weight in weights.items():
        if weight.shape != wanted[name].shape:
            kept, table = min(len(weight), len(wanted[name])), torch.zeros_like(wanted[name])
            old, new = ((len(each) - kept) // 2 for each in (weight, table))
            table[new : new + kept] = weight[old : old + kept]
            weights[name] = table
    other.load_state_dict(weights)
    return other.eval()
