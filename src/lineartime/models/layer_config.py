"""The configuration of a layer as plain data: its name, and its options, which are those of its class's constructor."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

from lineartime.errors import Argument, ArgumentError, check_choice, did_you_mean, spell
from lineartime.fields import Between, check_fields, check_limits, check_names, check_ranges, check_type, shown
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

_LAYERS = {name: layer for kinds in KINDS.values() for name, layer in kinds.items()}


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
        check_choice("kind", kind, tuple(_LAYERS))
        allowed = _own_options(kind)
        check_names(options, allowed, kind)
        for name, value in options.items():
            options[name] = value = _as_tuple(value, allowed[name].type)
            check_type(name, value, allowed[name].type)
            if type(value) in (int, float):
                check_limits(name, value, [Between(-(2**31), 2**31 - 1)])
        object.__setattr__(self, "kind", kind)
        values = tuple((name, options.get(name, option.default)) for name, option in allowed.items())
        object.__setattr__(self, "_options", values)

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
        return _LAYERS[self.kind]

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


@cache
def _own_options(kind: str) -> dict[str, Option]:
    """The options of a layer, except those that the model sets, such as causal, norm and dropout."""
    options = constructor_options(_LAYERS[kind])
    return {name: option for name, option in options.items() if name not in (*LayerOptions.__annotations__, "causal")}


def register_mixer(mixer: type[Any]) -> None:
    """Allow a mixer of another package, by its name; a class that is defined again replaces the one before."""
    KINDS["mixer"][mixer.name] = _LAYERS[mixer.name] = mixer
    _own_options.cache_clear()


def forget_mixer(mixer: type[Any]) -> None:
    """Undo `register_mixer`, for a mixer that turns out not to work."""
    del KINDS["mixer"][mixer.name], _LAYERS[mixer.name]
    _own_options.cache_clear()


def check_parts(config: Any) -> None:
    """Raise ArgumentError unless all fields have valid types and values, and every layer is allowed in its field."""
    for part, kinds in KINDS.items():
        value = getattr(config, part, None)
        if isinstance(value, str) and value in kinds:
            value = LayerConfig(value)
            object.__setattr__(config, part, value)
        if value is not None and not (isinstance(value, LayerConfig) and value.kind in kinds):
            allowed = f"a LayerConfig, or the name, of one of these kinds: {', '.join(kinds)}"
            raise ArgumentError(part, f"is {shown(value)}, but must be {allowed}.")
    check_fields(config)
    check_ranges(config)


def parts_to_dict(config: Any) -> dict[str, Any]:
    """Convert a dataclass to a plain dictionary for JSON, in which layers are dictionaries of kind and options."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value.to_dict() if isinstance(value, LayerConfig) else value for name, value in values.items()}


def parts_from_dict(data: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the fields from the dictionary of `parts_to_dict`, with a LayerConfig for each layer.

    A layer may also be a kind alone, which has its default options.
    """
    return {
        name: _layer(name, value) if name in KINDS and isinstance(value, (dict, str)) else value for name, value in data.items()
    }


def _layer(part: str, data: dict[str, Any] | str) -> LayerConfig:
    options = {"kind": data} if isinstance(data, str) else dict(data)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS[part]:
        like, own = did_you_mean(str(kind), KINDS[part]), spell(Argument("import"))
        advice = f"import the module that registers it, by {own}, or use one of {', '.join(KINDS[part])}"
        raise ArgumentError(f"{part}.kind", f"is {shown(kind)}{like}, which is not known here: {advice}.")
    kind, options = from_earlier(kind, options, _own_options(kind))
    try:
        return LayerConfig(kind, **options)
    except ArgumentError as error:
        raise ArgumentError(f"{part}.{error.argument}", *error.predicate) from None
