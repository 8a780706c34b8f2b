"""The configuration of a model, as transformers needs it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from lineartime.choices import VOCAB_SIZE, Task
from lineartime.errors import ArgumentError
from lineartime.models.config import ModelConfig
from lineartime.models.systems import resolve

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
"""The fields of a `ModelConfig`. This configuration has them under the same names, with layers as plain dictionaries."""
_OTHER_NAMES = {
    "n_blocks": ("n_layers", "n_layer", "num_layers", "num_hidden_layer", "num_blocks", "depth"),
    "d_model": ("hidden_dim", "hidden", "n_embd", "embed_dim", "dim", "model_dim", "d_hidden", "hidden_sizes", "width"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    "vocab_size": ("vocabulary_size", "num_tokens", "n_vocab"),
    "n_heads in mixer": ("num_attention_heads", "num_heads", "n_head", "n_heads"),
    "expansion in mixer or feed_forward": ("intermediate_size", "ffn_dim", "d_ff", "n_inner"),
}
"""What other models call our sizes. Transformers keeps unknown arguments as attributes, so they would be ignored."""


class LineartimeConfig(PreTrainedConfig):  # type: ignore[misc] # transformers makes it a dataclass
    """Describes the same models as a `ModelConfig`: every system of lineartime, at any size.

    The default is FLASH with 12 blocks of width 768. `from_preset` and `from_model_config` create others.

    Raises:
        ArgumentError: for fields that do not describe a model, and for an option of a layer outside `mixer` and `feed_forward`.
    """

    model_type: ClassVar[str] = "lineartime"
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "d_model", "num_hidden_layers": "n_blocks"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]
    auto_map: ClassVar[dict[str, str]] = {}  # where TRL looks up the Auto class of a model that transformers itself has not

    task: str = "clm"
    vocab_size: int = VOCAB_SIZE
    d_model: int = 768
    n_blocks: int = 12
    mixer: dict[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "flash"})
    feed_forward: dict[str, Any] | None = None
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    norm_position: str = "pre"
    final_norm: str = "same"
    embedding_norm: bool = False
    absolute_position: str = "scaled_sin"
    max_positions: int | None = None
    token_types: int = 0
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    pattern: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        super().__post_init__(**others)
        # Store all options of the layers, so that a later version with other defaults builds the same model.
        config = self.to_model_config()
        for name, value in config.to_dict().items():
            setattr(self, name, value)
        if "model_type" not in others:  # files of earlier versions may hold such names, which were ignored
            _check_others(config, others)

    def to_model_config(self) -> ModelConfig:
        """The configuration that `lineartime.build` takes."""
        return ModelConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    @classmethod
    def from_model_config(cls, config: ModelConfig, **others: Any) -> "LineartimeConfig":
        """The same model as a configuration of transformers; `others` are fields of transformers, such as eos_token_id."""
        return cls(**config.to_dict(), **others)

    @classmethod
    def from_preset(cls, preset: str, task: Task = "clm", **overrides: Any) -> "LineartimeConfig":
        """The configuration of a preset, with the arguments of `lineartime.build`."""
        return cls.from_model_config(resolve(preset, task, **overrides))


def _check_others(config: ModelConfig, others: Mapping[str, Any]) -> None:
    """Raise ArgumentError if `others`, which are not fields of the model, name an option of a layer, or a size of the model."""
    for part, layer in config.layers.items():
        for name in (name for name in others if name in layer.options):
            raise ArgumentError(
                name,
                f"is {others[name]!r}, which is an option of {part} and no field of the model: put it into {part}, or use "
                "LineartimeConfig.from_preset.",
            )
    for own, names in _OTHER_NAMES.items():
        for name in (name for name in names if name in others):
            raise ArgumentError(name, f"is {others[name]!r}, but no field of this model has that name: give {own}.")
