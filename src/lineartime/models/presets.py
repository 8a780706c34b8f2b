"""Ready-made configurations, each derived from another; sizes are those of the paper."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args, overload

from lineartime.models.config import AttentionConfig, FLASHConfig, GAUConfig, GLUConfig, ModelConfig, Task
from lineartime.models.heads import CausalLM, MaskedLM, build_model
from lineartime.ops.activations import check_choice

BYTE_VOCABULARY = 258
"""256 bytes, end of document and mask: what the tiny presets assume until a tokenizer says otherwise."""


def flash_base(task: Task) -> ModelConfig:
    """FLASH of 112 million parameters (arXiv 2202.10447, table 6)."""
    return ModelConfig(
        task=task,
        vocab_size=32_000,
        d_model=768,
        n_blocks=24,
        mixer=FLASHConfig(d_qk=128, chunk_size=256),
        norm="layernorm" if task == "clm" else "scalenorm",
    )


def flash_quad_base(task: Task) -> ModelConfig:
    """FLASH-Quad, the quadratic form of FLASH, of 112 million parameters."""
    return replace(flash_base(task), mixer=GAUConfig(d_qk=128))


def transformer_plus_plus_base(task: Task) -> ModelConfig:
    """Transformer++ (RoPE, GEGLU) of 110 million parameters."""
    return replace(flash_base(task), n_blocks=12, mixer=AttentionConfig(n_heads=12), feed_forward=GLUConfig())


def flash_tiny(task: Task) -> ModelConfig:
    """FLASH of 3 million parameters, for a laptop."""
    return replace(
        flash_base(task), vocab_size=BYTE_VOCABULARY, d_model=256, n_blocks=8, mixer=FLASHConfig(d_qk=64, chunk_size=128)
    )


def flash_quad_tiny(task: Task) -> ModelConfig:
    """FLASH-Quad of 3 million parameters."""
    return replace(flash_tiny(task), mixer=GAUConfig(d_qk=64))


def transformer_plus_plus_tiny(task: Task) -> ModelConfig:
    """Transformer++ of 3 million parameters."""
    return replace(flash_tiny(task), n_blocks=4, mixer=AttentionConfig(n_heads=4), feed_forward=GLUConfig())


PRESETS: dict[str, Callable[[Task], ModelConfig]] = {
    "flash-tiny": flash_tiny,
    "flash-quad-tiny": flash_quad_tiny,
    "transformer++-tiny": transformer_plus_plus_tiny,
    "flash-base": flash_base,
    "flash-quad-base": flash_quad_base,
    "transformer++-base": transformer_plus_plus_base,
}


def presets(task: Task = "clm") -> dict[str, ModelConfig]:
    """The configurations that `build` knows by name."""
    check_choice("task", task, get_args(Task))
    return {name: preset(task) for name, preset in PRESETS.items()}


def resolve(preset_or_config: str | ModelConfig, task: Task | None = None, **overrides: Any) -> ModelConfig:
    """The configuration that `build` builds from the same arguments."""
    if isinstance(preset_or_config, ModelConfig):
        return preset_or_config.override(**({} if task is None else {"task": task}), **overrides)
    check_choice("preset", preset_or_config, tuple(PRESETS))
    return presets(task or "clm")[preset_or_config].override(**overrides)


@overload
def build(preset_or_config: str, task: Literal["clm"] = "clm", **overrides: Any) -> CausalLM: ...
@overload
def build(preset_or_config: str, task: Literal["mlm"], **overrides: Any) -> MaskedLM: ...
@overload
def build(preset_or_config: ModelConfig, task: Task | None = None, **overrides: Any) -> CausalLM | MaskedLM: ...
def build(preset_or_config: str | ModelConfig, task: Task | None = None, **overrides: Any) -> CausalLM | MaskedLM:
    """Build a freshly initialised model: ids [B, T] -> logits [B, T, V].

    Args:
        preset_or_config: a name from `presets()`, or a `ModelConfig`.
        task: "clm", a causal language model (what a preset is unless told otherwise), or "mlm", a masked one; a config
            keeps its own unless told otherwise.
        **overrides: other values for fields of the config, its mixer or its feed-forward:
            `build("flash-base", vocab_size=50257, chunk_size=512)`.

    Raises:
        ValueError: for an unknown preset, field or value.
    """
    return build_model(resolve(preset_or_config, task, **overrides))
