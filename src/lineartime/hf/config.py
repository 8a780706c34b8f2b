"""The configuration of a model, as transformers needs it."""

import dataclasses
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from lineartime.choices import VOCAB_SIZE, Task
from lineartime.errors import ArgumentError
from lineartime.models.config import ModelConfig
from lineartime.models.systems import resolve

FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))
"""The fields of a `ModelConfig`. This configuration has them under the same names, with layers as plain dictionaries."""
_DEFAULT: dict[str, Any] = {"task": "clm", "vocab_size": VOCAB_SIZE, "d_model": 768, "n_blocks": 12, "mixer": {"kind": "flash"}}


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

    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        given = {self.attribute_map.get(name, name): value for name, value in others.items()}
        config = ModelConfig.from_dict({**_DEFAULT, **{name: given.pop(name) for name in FIELDS if name in given}})
        # Store all options of the layers, so that a later version with other defaults builds the same model.
        for name, value in {"pattern": [], **config.to_dict()}.items():
            setattr(self, name, value)
        super().__post_init__(**given)
        # Transformers keeps unknown arguments as attributes, and files of earlier versions may hold some.
        known = (PreTrainedConfig, GenerationConfig())
        for name in given if "model_type" not in given else ():
            if not any(hasattr(each, name) for each in known):
                what = f"is {given[name]!r}, but no field of this model has that name: its fields are {', '.join(FIELDS)}"
                raise ArgumentError(name, f"{what}; options of layers stand in mixer and feed_forward.")

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
