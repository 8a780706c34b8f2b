"""Language models built from configurations."""

from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.encoder_decoder import (
    EncoderDecoder,
    EncoderDecoderConfig,
    beam_search,
    encoder_decoder_config,
    greedy,
)
from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM, build_model
from lineartime.models.registering import import_modules, imported_names, register_system
from lineartime.models.systems import build, presets

__all__ = [
    "CausalLM",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "LanguageModel",
    "LayerConfig",
    "MaskedLM",
    "ModelConfig",
    "beam_search",
    "build",
    "build_model",
    "encoder_decoder_config",
    "greedy",
    "presets",
    "register_system",
]

import_modules(imported_names())
