"""Language models built from configurations."""

from importlib import import_module
from typing import Any

from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.models.language_model import CausalLM, LanguageModel, MaskedLM, build_model
from lineartime.models.registering import import_modules, imported_names, register_system
from lineartime.models.systems import build, presets

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

_SEQ2SEQ = ("EncoderDecoder", "EncoderDecoderConfig", "beam_search", "encoder_decoder_config")


def __getattr__(name: str) -> Any:  # at first use: encoder-decoders are made of models, and were here
    if name in _SEQ2SEQ:
        return getattr(import_module("lineartime.seq2seq"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


import_modules(imported_names())
