"""Language models built from configurations."""

from lineartime.models.config import AttentionConfig, FLASHConfig, GAUConfig, GLUConfig, MLPConfig, ModelConfig
from lineartime.models.heads import CausalLM, LanguageModel, MaskedLM, build_model
from lineartime.models.presets import build, presets

__all__ = [
    "AttentionConfig",
    "CausalLM",
    "FLASHConfig",
    "GAUConfig",
    "GLUConfig",
    "LanguageModel",
    "MLPConfig",
    "MaskedLM",
    "ModelConfig",
    "build",
    "build_model",
    "presets",
]
