"""The paper's training recipes, as defaults for `TrainConfig`.

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4 and appendix B.
"""

from typing import Any

from lineartime.models.presets import system_of
from lineartime.ops.activations import check_choice
from lineartime.training.config import RecipeName, TrainConfig

_SHARED: dict[str, Any] = {
    "tokenizer": "unigram-32000",
    "tokens_per_batch": 2**18,
    "steps": 125_000,
    "warmup_steps": 10_000,
    "optimizer": "adamw",
    "learning_rate": 7e-4,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-6,
    "weight_decay": 0.01,
    "clip_norm": 0.1,
    "clip": "local",
    "eval_every": 1_000,
}

_RECIPES: dict[RecipeName, dict[str, Any]] = {
    "lm-wiki40b": {"data": "wiki40b", "task": "clm", "context_length": 1024},
    "lm-pg19": {"data": "pg19", "task": "clm", "context_length": 1024},
    "mlm-c4": {"data": "c4", "task": "mlm", "context_length": 512, "streaming": True},
}

_CHUNK_SIZES: dict[RecipeName, int] = {"lm-wiki40b": 256, "lm-pg19": 512, "mlm-c4": 256}


def recipe_config(recipe: RecipeName, preset: str = "flash-base") -> TrainConfig:
    """The recipe's options for a preset; override any of them.

    Args:
        recipe: lm-wiki40b, lm-pg19 (chunks of 512 tokens; its metric is the word-level perplexity) or mlm-c4.
        preset: the model. It gets the recipe's chunk size unless its system fixes one; the vanilla Transformer is not clipped.

    Raises:
        ArgumentError: for an unknown recipe or preset.
    """
    check_choice("recipe", recipe, tuple(_RECIPES))
    values = {**_SHARED, **_RECIPES[recipe], "recipe": recipe, "preset": preset}
    system = system_of(preset)
    if system.takes_chunk_size:
        values["override"] = (f"chunk_size={_CHUNK_SIZES[recipe]}",)
    if not system.clipped:
        values["clip_norm"] = 0.0
    return TrainConfig(**values)
