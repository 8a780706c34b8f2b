"""Language models built from configurations."""

from lineartime.models.config import GLUConfig, MLPConfig, ModelConfig
from lineartime.models.context_parallel import set_context_parallel
from lineartime.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, greedy
from lineartime.models.heads import CausalLM, LanguageModel, MaskedLM, build_model
from lineartime.models.mixers import MIXER_KINDS, AttentionConfig, CrossGAUConfig, FLASHConfig, GAUConfig, MixerConfig
from lineartime.models.presets import build, presets

__all__ = [
    "MIXER_KINDS",
    "AttentionConfig",
    "CausalLM",
    "CrossGAUConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "FLASHConfig",
    "GAUConfig",
    "GLUConfig",
    "LanguageModel",
    "MLPConfig",
    "MaskedLM",
    "MixerConfig",
    "ModelConfig",
    "build",
    "build_model",
    "greedy",
    "presets",
    "set_context_parallel",
]
