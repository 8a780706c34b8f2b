"""A model described by plain data: what it is made of, and how large it is."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lineartime.errors import ArgumentError
from lineartime.layers.checks import check_positive
from lineartime.layers.cross import CrossGAU
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.norms import Norm
from lineartime.layers.options import Option, constructor_options
from lineartime.layers.residual import ResidualLayer
from lineartime.models.fields import check_fields, check_names, check_type, from_fields
from lineartime.models.systems import SYSTEMS
from lineartime.ops.activations import check_choice

Task = Literal["clm", "mlm"]

KINDS: dict[str, dict[str, type[ResidualLayer]]] = {
    "mixer": {system.mixer.name: system.mixer for system in SYSTEMS.values()},
    "feed_forward": {MLP.name: MLP, GLU.name: GLU},
    "cross": {CrossGAU.name: CrossGAU},
}
"""The layers that each part of a model can be, by name."""

_LAYERS = {name: layer for kinds in KINDS.values() for name, layer in kinds.items()}
_OF_THE_MODEL = ("causal", "norm", "dropout")


@dataclass(frozen=True, init=False, repr=False)
class LayerConfig:
    """A layer of a model, described by its name and its options: `LayerConfig("flash", chunk_size=64)`.

    Options that are left out take the defaults of the layer's class. Width, direction, norm and dropout are the model's.

    Args:
        kind: the name of a mixer, for instance "flash", of a feed-forward layer, "mlp" or "glu", or "cross-gau".
        **options: keyword arguments of the layer's class.

    Raises:
        ArgumentError: for an unknown kind or option, or a value of the wrong type.
    """

    kind: str
    _options: tuple[tuple[str, Any], ...]

    def __init__(self, kind: str, /, **options: Any) -> None:
        check_choice("kind", kind, tuple(_LAYERS))
        allowed = _own_options(kind)
        check_names(options, allowed, kind)
        for name, value in options.items():
            check_type(name, value, allowed[name].type)
        object.__setattr__(self, "kind", kind)
        values = tuple((name, options.get(name, option.default)) for name, option in allowed.items())
        object.__setattr__(self, "_options", values)

    def __repr__(self) -> str:
        arguments = [repr(self.kind), *(f"{name}={value!r}" for name, value in self._options)]
        return f"LayerConfig({', '.join(arguments)})"

    @property
    def options(self) -> dict[str, Any]:
        """The layer's options by name, defaults included; a copy."""
        return dict(self._options)

    @property
    def layer(self) -> type[Any]:
        """The class of the layer."""
        return _LAYERS[self.kind]

    def override(self, /, **options: Any) -> "LayerConfig":
        """A copy with other values for some options."""
        return LayerConfig(self.kind, **{**self.options, **options})

    def build(self, d_model: int, **options: Any) -> Any:
        """The layer, freshly initialised; `options` are those of the model: norm, dropout and, for a mixer, causal."""
        return self.layer(d_model, **self.options, **options)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON: {"kind": "flash", "d_qk": 128, ...}."""
        return {"kind": self.kind, **self.options}


@functools.cache
def _own_options(kind: str) -> dict[str, Option]:
    """The options of a layer that are not the model's."""
    options = constructor_options(_LAYERS[kind])
    return {name: option for name, option in options.items() if name not in _OF_THE_MODEL}


@dataclass(frozen=True)
class ModelConfig:
    """A language model: embedding, N equal blocks of a mixer and perhaps a feed-forward layer, norm, logits.

    Attributes:
        task: "clm", a causal language model, or "mlm", a masked (bidirectional) one.
        vocab_size: number of tokens; input and output embeddings are tied.
        d_model: width of the residual stream.
        n_blocks: number of blocks.
        mixer: what moves information between tokens.
        feed_forward: what follows the mixer in a block, or None: a gated attention unit needs none.
        norm: the norm before every layer and before the logits.
        absolute_position: "scaled_sin" adds a scaled sinusoid to the embeddings; "learned" adds one learned vector for each
            position; "none" adds nothing.
        max_positions: how many positions are learned, and so the longest sequence, where they are.
        dropout: of every layer's output.

    Raises:
        ArgumentError: for a value of the wrong type or outside what it allows.
    """

    task: Task
    vocab_size: int
    d_model: int
    n_blocks: int
    mixer: LayerConfig
    feed_forward: LayerConfig | None = None
    norm: Norm = "layernorm"
    absolute_position: Literal["scaled_sin", "learned", "none"] = "scaled_sin"
    max_positions: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_parts(self)
        check_positive(vocab_size=self.vocab_size, d_model=self.d_model, n_blocks=self.n_blocks)
        if (self.max_positions is not None) != (self.absolute_position == "learned"):
            raise ArgumentError(
                "max_positions",
                f"is {self.max_positions} with absolute_position = {self.absolute_position!r}, but learned positions need a "
                "number of them, and no others have one.",
            )
        if self.max_positions is not None:
            check_positive(max_positions=self.max_positions)

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that the model can read, or None where there is no limit."""
        with torch.device("meta"):
            mixer = self.mixer.build(self.d_model)
        limits = [limit for limit in (self.max_positions, mixer.longest_sequence) if limit is not None]
        return min(limits, default=None)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON, from which `from_dict` makes an equal config."""
        return parts_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ModelConfig":
        """The config that `to_dict` described; options of layers that are missing take their defaults.

        Raises:
            ArgumentError: naming the field, for anything unknown, missing or of the wrong type.
        """
        return from_fields(cls, parts_from_dict(data), "the model")

    def override(self, /, **values: Any) -> "ModelConfig":
        """A copy with other values: a field of the model, or an option of its mixer or feed-forward under its own name.

        `config.override(vocab_size=32000, chunk_size=512)`.

        Raises:
            ArgumentError: for a name that no part of this config has, or that two have, or a value that is not allowed.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own = parts_from_dict({name: value for name, value in values.items() if name in fields})
        changed = {**fields, **own}
        parts = {name: part for name, part in changed.items() if isinstance(part, LayerConfig)}
        for name in [name for name in values if name not in own]:
            owners = [part for part, layer in parts.items() if name in layer.options]
            if len(owners) > 1:
                raise ArgumentError(name, f"is an option of both {' and '.join(owners)}: override one of these as a whole.")
            if not owners:
                allowed = dict.fromkeys([*fields, *(option for layer in parts.values() for option in layer.options)])
                check_names([name], allowed, "this model")
            changed[owners[0]] = changed[owners[0]].override(**{name: values[name]})
        return from_fields(ModelConfig, changed, "the model")


def check_parts(config: Any) -> None:
    """Raise ArgumentError unless every field has its type, and every layer is of a kind that stands there."""
    for part, kinds in KINDS.items():
        value = getattr(config, part, None)
        if value is not None and not (isinstance(value, LayerConfig) and value.kind in kinds):
            raise ArgumentError(part, f"is {value!r}, but must be a LayerConfig of one of the kinds {', '.join(kinds)}.")
    check_fields(config)


def parts_to_dict(config: Any) -> dict[str, Any]:
    """A plain dictionary for JSON of a dataclass, its layers with their kinds and options."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value.to_dict() if isinstance(value, LayerConfig) else value for name, value in values.items()}


def parts_from_dict(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `parts_to_dict` described, dictionaries of layers made into configs."""
    return {name: _layer(name, value) if name in KINDS and isinstance(value, dict) else value for name, value in data.items()}


def _layer(part: str, data: dict[str, Any]) -> LayerConfig:
    options = dict(data)
    kind = options.pop("kind", None)
    check_choice(f"{part}.kind", kind, tuple(KINDS[part]))
    try:
        return LayerConfig(kind, **options)
    except ArgumentError as error:
        raise ArgumentError(f"{part}.{error.argument}", error.predicate) from None
