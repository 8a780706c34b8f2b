"""The configuration of a layer as plain data: its name, and its options, which are those of its class's constructor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from types import UnionType
from typing import Any, Union, get_args, get_origin

from typing_extensions import Self

from lineartime.errors import ArgumentError, check_choice, did_you_mean
from lineartime.fields import Between, check_fields, check_limits, check_names, check_type, from_fields, shown
from lineartime.foreign.mixers import ForeignCrossGAU, ForeignFLASH, ForeignGAU, NormPosition, from_earlier, post_norm
from lineartime.layers.cross import CrossGAU
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.options import Option, constructor_options
from lineartime.layers.residual import LayerOptions
from lineartime.models.systems import SYSTEMS
from lineartime.units import number_or_text

KINDS: dict[str, dict[str, type[Any]]] = {
    "mixer": {
        **{system.mixer.name: system.mixer for system in SYSTEMS.values()},
        **{layer.name: layer for layer in (ForeignFLASH, ForeignGAU)},
    },
    "feed_forward": {MLP.name: MLP, GLU.name: GLU},
    "cross": {CrossGAU.name: CrossGAU, ForeignCrossGAU.name: ForeignCrossGAU},
}
"""The layers allowed for each part of a model, by name."""


@dataclass(frozen=True, init=False, repr=False)
class LayerConfig:
    """A layer of a model, described by its name and its options: `LayerConfig("flash", chunk_size=64)`.

    Omitted options take the defaults of the layer's class. Width, direction, norm and dropout are set by the model.

    Args:
        kind: the name of a mixer, such as "flash"; of a feed-forward layer, "mlp" or "glu"; or "cross-gau".
        **options: keyword arguments of the layer's class.

    Raises:
        ArgumentError: for an unknown kind or option, or a value of the wrong type.
    """

    kind: str
    _options: tuple[tuple[str, Any], ...]

    def __init__(self, kind: str, /, **options: Any) -> None:
        check_choice("kind", kind, tuple(name for kinds in KINDS.values() for name in kinds))
        object.__setattr__(self, "kind", kind)
        allowed = own_options(self.layer)
        check_names(options, allowed, kind)
        for name, value in options.items():
            options[name] = value = _as_tuple(value, allowed[name].type)
            check_type(name, value, allowed[name].type)
            if type(value) in (int, float):
                check_limits(name, value, [Between(-(2**31), 2**31 - 1)])
        values = {name: options.get(name, option.default) for name, option in allowed.items()}
        for name in [name for name, value in values.items() if value is Parameter.empty]:
            raise ArgumentError(name, f"is missing: {kind} has no default for it.")
        object.__setattr__(self, "_options", tuple(values.items()))

    def __repr__(self) -> str:
        arguments = [repr(self.kind), *(f"{name}={value!r}" for name, value in self._options)]
        return f"LayerConfig({', '.join(arguments)})"

    @property
    def options(self) -> dict[str, Any]:
        """A copy of the layer's options by name, including defaults."""
        return dict(self._options)

    @property
    def layer(self) -> type[Any]:
        """The class of the layer."""
        return next(kinds[self.kind] for kinds in KINDS.values() if self.kind in kinds)

    def override(self, /, **options: Any) -> "LayerConfig":
        """Return a copy with other values for some options."""
        return LayerConfig(self.kind, **{**self.options, **options})

    def build(self, d_model: int, norm_position: NormPosition = "pre", **options: Any) -> Any:
        """Build the layer, freshly initialised. The model sets `options`: norm, dropout and, for a mixer, causal."""
        layer = self.layer if norm_position == "pre" else post_norm(self.layer)
        return layer(d_model, **self.options, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON: {"kind": "flash", "d_qk": 128, ...}."""
        return {"kind": self.kind, **self.options}


def _as_tuple(value: Any, hint: Any) -> Any:
    """A value with tuples in place of the lists of JSON and, for an option of several values, of texts with commas."""
    if isinstance(value, (list, tuple)):
        return tuple(_as_tuple(item, None) for item in value)
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    of_items = next((get_args(each)[0] for each in hints if get_origin(each) is tuple), None)
    if of_items is None or value is None or (isinstance(value, str) and str in hints):
        return value
    if not isinstance(value, str):
        return (value,)
    return tuple(item if of_items is str else number_or_text(item) for item in value.split(",") if item)


def _own_options(layer: type[Any]) -> dict[str, Option]:
    """The options of a layer, except those that the model sets, such as causal, norm and dropout."""
    options = constructor_options(layer)
    return {name: option for name, option in options.items() if name not in (*LayerOptions.__annotations__, "causal")}


own_options: Callable[[Any], dict[str, Option]] = cache(_own_options)  # to type checkers, a class is not hashable


@dataclass(frozen=True)
class PartsConfig:
    """Base of the configurations of models: plain values, and a LayerConfig for each part named in `KINDS`."""

    def __post_init__(self) -> None:
        """Raise ArgumentError unless all fields have valid types and values. A part may be its name, or its dictionary."""
        for part, kinds in KINDS.items():
            if (value := getattr(self, part, None)) is not None:
                object.__setattr__(self, part, as_layer(part, value, kinds))
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON, from which `from_dict` restores an equal config.

        An empty pattern is left out: without one, the description of a model is what earlier versions wrote.
        """

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return [plain(item) for item in value]
            return value.to_dict() if isinstance(value, LayerConfig) else value

        return {name: plain(value) for name, value in vars(self).items() if value != ()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore a config from the dictionary of `to_dict`. Missing layer options take their defaults.

        Raises:
            ArgumentError: naming the field, for anything unknown, missing or of the wrong type.
        """
        return from_fields(cls, dict(data))

    @property
    def override_names(self) -> list[str]:
        """The names that `override` accepts: fields of the model, then options of its layers."""
        return list(dict.fromkeys([*vars(self), *(option for part in self.layers.values() for option in part.options)]))

    @property
    def layers(self) -> dict[str, LayerConfig]:
        """The layers by their names in `override`."""
        return {name: value for name, value in vars(self).items() if isinstance(value, LayerConfig)}

    def with_layers(self, layers: Mapping[str, LayerConfig]) -> Self:
        """Return a copy with other layers, named as in `layers`."""
        return self.from_dict({**vars(self), **layers})

    def override(self, /, **values: Any) -> Self:
        """Return a copy with other values for fields of the model, or for options of its layers.

        For instance, `config.override(vocab_size=32000, chunk_size=512)`. An option that several parts have is named with its
        part: `config.override(**{"cross.n_heads": 4})`.

        Raises:
            ArgumentError: for a name that no part of this config has, a name that two parts have, or an invalid value.
        """
        if not values:
            return self
        fields = {name: value for name, value in values.items() if name in vars(self)}
        changed = self.from_dict({**vars(self), **fields})
        # An option of one mixer of a pattern is set after those of all.
        for name in sorted((name for name in values if name not in fields), key=lambda name: name.count(".")):
            part, _, option = name.rpartition(".")
            owners = {each: layer for each, layer in changed.layers.items() if option in layer.options}
            parts = {each: "mixer" if each.startswith("pattern.") else each for each in owners}
            owners = {each: layer for each, layer in owners.items() if part in ("", each, parts[each])}
            several = list(dict.fromkeys(parts[each] for each in owners))
            if len(several) > 1:
                choices = " or ".join(f"{owner}.{name}" for owner in several)
                raise ArgumentError(name, f"is an option of both {' and '.join(several)}: set {choices}.")
            if not owners:
                check_names([name], changed.override_names, "this model")
            changed = changed.with_layers({each: layer.override(**{option: values[name]}) for each, layer in owners.items()})
        return changed


def as_layer(name: str, value: Any, kinds: Mapping[str, type[Any]]) -> LayerConfig:
    """The layer that a value describes: itself, a name or a dictionary. Raises ArgumentError for a layer of another kind."""
    if isinstance(value, (dict, str)):
        value = _decoded(name, {"kind": value} if isinstance(value, str) else dict(value), kinds)
    if not (isinstance(value, LayerConfig) and value.kind in kinds):
        allowed = f"a LayerConfig, or the name, of one of these kinds: {', '.join(kinds)}"
        raise ArgumentError(name, f"is {shown(value)}, but must be {allowed}.")
    return value


def _decoded(name: str, options: dict[str, Any], kinds: Mapping[str, type[Any]]) -> LayerConfig:
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        like, own = did_you_mean(str(kind), kinds), "`import`"
        advice = f"import the module that registers it, by {own}, or use one of {', '.join(kinds)}"
        raise ArgumentError(f"{name}.kind", f"is {shown(kind)}{like}, which is not known here: {advice}.")
    kind, options = from_earlier(kind, options, own_options(kinds[kind]))
    try:
        return LayerConfig(kind, **options)
    except ArgumentError as error:
        raise ArgumentError(f"{name}.{error.argument}", error.predicate) from None
