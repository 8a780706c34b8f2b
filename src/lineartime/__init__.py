"""Transformer quality in linear time: GAU, FLASH-Quad and FLASH for PyTorch."""

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineartime.checkpoint import load, load_tokenizer, save
    from lineartime.errors import ArgumentError, LineartimeError
    from lineartime.evaluation import Evaluation, evaluate
    from lineartime.generation import (
        PromptState,
        Sampling,
        generate,
        generate_batch,
        load_state,
        read_prompt,
        save_state,
    )
    from lineartime.layers import FLASH, GAU
    from lineartime.models import CausalLM, LayerConfig, MaskedLM, ModelConfig, register_system
    from lineartime.models.systems import build, presets
    from lineartime.text_generation import fill_mask, generate_samples, generate_text
    from lineartime.training.config import TrainConfig
    from lineartime.training.loop import TrainingResult, train

    __version__: str

__all__ = [
    "FLASH",
    "GAU",
    "ArgumentError",
    "CausalLM",
    "Evaluation",
    "LayerConfig",
    "LineartimeError",
    "MaskedLM",
    "ModelConfig",
    "PromptState",
    "Sampling",
    "TrainConfig",
    "TrainingResult",
    "__version__",
    "build",
    "evaluate",
    "fill_mask",
    "generate",
    "generate_batch",
    "generate_samples",
    "generate_text",
    "load",
    "load_state",
    "load_tokenizer",
    "presets",
    "read_prompt",
    "register_system",
    "save",
    "save_state",
    "train",
]

_MODULE_OF = {
    name: module
    for module, names in {
        "checkpoint": ("load", "load_tokenizer", "save"),
        "errors": ("ArgumentError", "LineartimeError"),
        "evaluation": ("Evaluation", "evaluate"),
        "generation": ("PromptState", "Sampling", "generate", "generate_batch", "load_state", "read_prompt", "save_state"),
        "layers": ("FLASH", "GAU"),
        "models": ("CausalLM", "LayerConfig", "MaskedLM", "ModelConfig", "build", "presets", "register_system"),
        "text_generation": ("fill_mask", "generate_samples", "generate_text"),
        "training.config": ("TrainConfig",),
        "training.loop": ("TrainingResult", "train"),
    }.items()
    for name in names
}
_SUBMODULES = (
    "baselines",
    "bench",
    "checkpoint",
    "data",
    "errors",
    "evaluation",
    "export",
    "foreign",
    "generation",
    "inspection",
    "layers",
    "models",
    "ops",
    "runs",
    "seq2seq",
    "text_generation",
    "training",
)


def __getattr__(name: str) -> Any:
    # Imported at first use: layers and models need torch alone, while checkpoints and training need more packages. The
    # command line must also be able to handle an interrupt while torch is being imported.
    if name in _MODULE_OF:
        return getattr(import_module(f"lineartime.{_MODULE_OF[name]}"), name)
    if name in _SUBMODULES:
        return import_module(f"lineartime.{name}")
    if name == "__version__":
        from lineartime.host import installed_version

        return installed_version("lineartime") or "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *_SUBMODULES]


if os.environ.get("LINEARTIME_IMPORT"):  # before any module of the library, so that yours can import all of them
    from lineartime.errors import LineartimeError

    with suppress(LineartimeError, ImportError):  # raised again by the first use of models, where the command line shows it
        import_module("lineartime.models")
