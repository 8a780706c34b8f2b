"""The paper's training recipes, as other defaults for `TrainConfig`.

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4 and appendix A.
"""

from typing import Any

from lineartime.models.presets import resolve
from lineartime.training.config import RecipeName, TrainConfig

_SHARED: dict[str, Any] = {
    "tokenizer": "unigram-32000",
    "tokens_per_batch": 2**18,
    "steps": 125_000,
    "warmup_steps": 10_000,
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

NOT_CLIPPED = ("transformer-",)
"""The vanilla Transformer, of all models, is trained without clipping."""


def recipe_config(recipe: RecipeName, preset: str = "flash-base") -> TrainConfig:
    """The options of a recipe for a model, which any of them may be changed of.

    Args:
        recipe: lm-wiki40b, lm-pg19 (chunks of 512 tokens; its metric is the word-level perplexity of `eval`) or mlm-c4.
        preset: the model; FLASH gets the chunk size of the recipe, the vanilla Transformer is not clipped.
    """
    values = {**_SHARED, **_RECIPES[recipe], "recipe": recipe, "preset": preset}
    if preset.startswith("flash") and "chunk_size" in resolve(preset, values["task"]).mixer.options:
        values["override"] = (f"chunk_size={_CHUNK_SIZES[recipe]}",)
    if preset.startswith(NOT_CLIPPED):
        values["clip_norm"] = 0.0
    return TrainConfig(**values)
