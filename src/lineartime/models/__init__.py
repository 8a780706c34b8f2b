"""Language models built from configurations."""

from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM, build_model
from lineartime.models.systems import build, import_modules, imported_names, presets, register_system

__all__ = [
    "CausalLM",
    "LanguageModel",
    "LayerConfig",
    "MaskedLM",
    "ModelConfig",
    "build",
    "build_model",
    "presets",
    "register_system",
]

import_modules(imported_names())
