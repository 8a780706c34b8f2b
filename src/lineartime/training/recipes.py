"""Training recipes, as defaults for `TrainConfig`: `quick`, for minutes on a laptop, and those of the paper.

Source of the paper's recipes: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 4 and appendix B.
"""

from typing import Any

from lineartime.errors import check_choice
from lineartime.models.presets import system_of
from lineartime.training.config import RecipeName, TrainConfig

_PAPER: dict[str, Any] = {
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
    "quick": {
        "preset": "flash-memory-tiny",
        "tokenizer": "bpe-4096",
        "optimizer": "muon",
        "learning_rate": 5e-3,
        "adamw_ratio": 2.0,
        "steps": 420,
    },
    "lm-wiki40b": {**_PAPER, "data": "wiki40b", "task": "clm", "context_length": 1024},
    "lm-pg19": {**_PAPER, "data": "pg19", "task": "clm", "context_length": 1024},
    "mlm-c4": {**_PAPER, "data": "c4", "task": "mlm", "context_length": 512, "streaming": True},
    "mlm-wikipedia-4096": {
        **_PAPER,
        "data": "hub:wikimedia/wikipedia/20231101.en",
        "task": "mlm",
        "context_length": 4096,
        "streaming": True,
    },
}

_CHUNK_SIZES: dict[RecipeName, int] = {"lm-wiki40b": 256, "lm-pg19": 512, "mlm-c4": 256}


def recipe_config(recipe: RecipeName, preset: str | None = None) -> TrainConfig:
    """The options of a recipe for a preset, by default its own; any of them can be overridden.

    In the paper's recipes, the model gets the recipe's chunk size unless its system fixes one, and the gradients of the vanilla
    Transformer are not clipped. Raises ArgumentError for an unknown recipe or preset.
    """
    check_choice("recipe", recipe, tuple(_RECIPES))
    values = {"preset": TrainConfig.preset, **_RECIPES[recipe], "recipe": recipe}
    preset = values["preset"] = preset or values["preset"]
    system = system_of(preset)
    if system.takes_chunk_size and recipe in _CHUNK_SIZES:
        values["override"] = (f"chunk_size={_CHUNK_SIZES[recipe]}",)
    if not system.clips_gradient and recipe != "quick":
        values["clip_norm"] = 0.0
    return TrainConfig(**values)
