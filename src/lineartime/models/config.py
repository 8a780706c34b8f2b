"""The configuration of a model as plain data: its layers, with the options of their constructors, and its sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import nn
from typing_extensions import Self

from lineartime.choices import Task
from lineartime.errors import ArgumentError, check_choice, did_you_mean
from lineartime.fields import Between, check_fields, check_limits, check_names, decode, from_fields, shown
from lineartime.foreign.mixers import ForeignFLASH, ForeignGAU, NormPosition, post_norm
from lineartime.layers.cross import CrossGAU
from lineartime.layers.feedforward import GLU, MLP
from lineartime.layers.flash import FLASH
from lineartime.layers.mesa import FLASHMesa, Memory
from lineartime.layers.mixer import READ_PREFIX, Mixer
from lineartime.layers.residual import LayerOptions, Norm, Option, constructor_options
from lineartime.machine import shapes_only

if TYPE_CHECKING:
    from lineartime.models.language_model import CausalLM, MaskedLM

KINDS: dict[str, dict[str, type[Any]]] = {
    "mixer": {ForeignFLASH.name: ForeignFLASH, ForeignGAU.name: ForeignGAU},
    "feed_forward": {MLP.name: MLP, GLU.name: GLU},
    "cross": {CrossGAU.name: CrossGAU},
}
"""The layers allowed for each part of a model, by name; the table of systems adds its mixers."""


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
        layers = known_layers()
        check_choice("kind", kind, tuple(layers))
        allowed = own_options(layers[kind])
        check_names(options, allowed, kind)
        for name, value in options.items():
            options[name] = decode(allowed[name].type, value, name)  # a list of JSON becomes a tuple
            if type(value) in (int, float):
                check_limits(name, value, [Between(-(2**31), 2**31 - 1)])
        values = {name: options.get(name, option.default) for name, option in allowed.items()}
        for name in [name for name, value in values.items() if value is Parameter.empty]:
            raise ArgumentError(name, f"is missing: {kind} has no default for it.")
        object.__setattr__(self, "kind", kind)
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
        return FLASHMesa if self.options.get("memory") == "mesa" else known_layers()[self.kind]

    def override(self, /, **options: Any) -> "LayerConfig":
        """Return a copy with other values for some options."""
        return LayerConfig(self.kind, **{**self.options, **options})

    def build(self, d_model: int, norm_position: NormPosition = "pre", **options: Any) -> Any:
        """Build the layer, freshly initialised. The model sets `options`: norm, dropout and, for a mixer, causal."""
        layer = self.layer if norm_position == "pre" else post_norm(self.layer)
        own = {name: value for name, value in self.options.items() if name != "memory"}
        return layer(d_model, **own, **options)


def known_layers() -> dict[str, type[Any]]:
    """The classes of all layers by name."""
    return {name: layer for kinds in KINDS.values() for name, layer in kinds.items()}


def _own_options(layer: type[Any]) -> dict[str, Option]:
    """The options of a layer, except those that the model sets, such as causal, norm and dropout."""
    options = constructor_options(layer)
    if layer in (FLASH, ForeignFLASH):  # it selects the class, `LayerConfig.layer`, and is not an option of a constructor
        options["memory"] = Option(Memory if layer is FLASH else Literal["sum"], "sum")
    return {name: option for name, option in options.items() if name not in (*LayerOptions.__annotations__, "causal")}


own_options: Callable[[Any], dict[str, Option]] = cache(_own_options)  # to type checkers, a class is not hashable


class PartsConfig:
    """Base of the configurations of models: plain values, and a LayerConfig for each part named in `KINDS`."""

    mixer: LayerConfig
    pattern: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        """Raise ArgumentError unless all fields have valid types and values. A part may be its name, or its dictionary."""
        for part, kinds in KINDS.items():
            if (value := getattr(self, part, None)) is not None:
                object.__setattr__(self, part, as_layer(part, value, kinds))
        if self.pattern != ():
            object.__setattr__(self, "pattern", read_pattern(self.pattern, {self.mixer.kind: self.mixer}))
        check_fields(self)

    def build(self) -> nn.Module:
        """Build the model, freshly initialised."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dictionary for JSON, from which `from_dict` restores an equal config.

        An empty pattern is left out: without one, the description of a model is what earlier versions wrote.
        """

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return [plain(item) for item in value]
            return {"kind": value.kind, **value.options} if isinstance(value, LayerConfig) else value

        return {name: plain(value) for name, value in vars(self).items() if value != ()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Restore a config from the dictionary of `to_dict`. Missing layer options take their defaults.

        Raises:
            ArgumentError: naming the field, for anything unknown, missing or of the wrong type.
        """
        return from_fields(cls, dict(data))

    @property
    def mixers(self) -> tuple[LayerConfig, ...]:
        """The mixers of the blocks in turn, which repeat: those of the pattern, or `mixer` alone."""
        return self.pattern or (self.mixer,)

    @property
    def layers(self) -> dict[str, LayerConfig]:
        """The layers by their names in `override`: "mixer" or, with a pattern, "pattern.0", "pattern.1" and so on."""
        layers = {f"pattern.{place}": mixer for place, mixer in enumerate(self.pattern)}
        others = {name: value for name, value in vars(self).items() if isinstance(value, LayerConfig)}
        return layers | {name: layer for name, layer in others.items() if name != "mixer" or not self.pattern}

    @property
    def values(self) -> dict[str, Any]:
        """All values by their names in `override`, except the task and the layers themselves."""
        values = {name: value for name, value in vars(self).items() if name not in ("task", "mixer", "feed_forward")}
        for part, layer in self.layers.items():
            values |= {f"{part}.{option}" if self.pattern else option: value for option, value in layer.options.items()}
        return values | ({"pattern": tuple(layer.kind for layer in self.pattern)} if self.pattern else {})

    def with_layers(self, layers: Mapping[str, LayerConfig]) -> Self:
        """Return a copy with other layers, named as in `layers`."""
        values = vars(self) | {name: layer for name, layer in layers.items() if name in vars(self)}
        if self.pattern:
            pattern = [layers.get(f"pattern.{place}", mixer) for place, mixer in enumerate(self.pattern)]
            values |= {"mixer": pattern[0], "pattern": pattern}
        return self.from_dict(values)

    def override(self, /, **values: Any) -> Self:
        """Return a copy with other values for fields of the model, or for options of its layers.

        For instance, `config.override(vocab_size=32000, chunk_size=512)`. An option that several parts have is named with its
        part: `config.override(**{"cross.n_heads": 4})`. A pattern also sets `mixer`, and an option of a mixer is set in every
        one that has it or, with its place in the pattern, in one: `config.override(**{"pattern.3.d_qk": 64})`.

        Raises:
            ArgumentError: for a name that no part of this config has, a name that two parts have, or an invalid value.
        """
        if not values:
            return self
        if pattern := read_pattern(values.get("pattern", ()), {mixer.kind: mixer for mixer in reversed(self.mixers)}):
            values = {"mixer": pattern[0], **values, "pattern": pattern}
        fields = {name: value for name, value in values.items() if name in vars(self)}
        changed = self.from_dict({**vars(self), **fields})
        layers = changed.layers
        # An option of one mixer of a pattern is set after those of all.
        for name in sorted((name for name in values if name not in fields), key=lambda name: name.count(".")):
            part, _, option = name.rpartition(".")
            kinds = {each: "mixer" if each.startswith("pattern.") else each for each in layers}
            owners = [each for each in layers if option in layers[each].options and part in ("", each, kinds[each])]
            several = list(dict.fromkeys(kinds[each] for each in owners))
            if len(several) > 1:
                choices = " or ".join(f"{owner}.{name}" for owner in several)
                raise ArgumentError(name, f"is an option of both {' and '.join(several)}: set {choices}.")
            if not owners:
                options = (option for each in changed.layers.values() for option in each.options)
                check_names([name], list(dict.fromkeys([*vars(self), *options])), "this model")
            layers |= {each: layers[each].override(**{option: values[name]}) for each in owners}
        return changed.with_layers(layers)


def as_layer(name: str, value: Any, kinds: Mapping[str, type[Any]]) -> LayerConfig:
    """The layer that a value describes: itself, a name or a dictionary. Raises ArgumentError for a layer of another kind."""
    if isinstance(value, (dict, str)):
        options = {"kind": value} if isinstance(value, str) else dict(value)
        kind = options.pop("kind", None)
        if not isinstance(kind, str) or kind not in kinds:
            advice = f"import the module that registers it, by `import`, or use one of {', '.join(kinds)}"
            found = f"is {shown(kind)}{did_you_mean(str(kind), kinds)}, which is not known here"
            raise ArgumentError(f"{name}.kind", f"{found}: {advice}.")
        try:
            return LayerConfig(kind, **options)
        except ArgumentError as error:
            raise ArgumentError(f"{name}.{error.argument}", error.predicate) from None
    if not (isinstance(value, LayerConfig) and value.kind in kinds):
        allowed = f"a LayerConfig, or the name, of one of these kinds: {', '.join(kinds)}"
        raise ArgumentError(name, f"is {shown(value)}, but must be {allowed}.")
    return value


def why_not_learned(mixer: type[Mixer], task: Task) -> str | None:
    """Why a model of a mixer cannot learn a task, as the end of a sentence; None if it can."""
    if task != "mlm" and mixer.why_not_causal is not None:
        return f"cannot be causal: {mixer.why_not_causal}; use `task='mlm'`."
    if task == "mlm" and mixer.why_only_causal is not None:
        return f"must be causal: {mixer.why_only_causal}; use `task='clm'`."
    if task == "prefix-lm" and not mixer.reads_prefix:
        return f"cannot read a prefix in both directions: only {READ_PREFIX} do."
    return None


def read_pattern(pattern: object, known: Mapping[str, LayerConfig]) -> tuple[LayerConfig, ...]:
    """The mixers of a pattern, a tuple or a text with commas, in which a name stands for the `known` mixer of this kind."""
    if isinstance(pattern, str):
        names = pattern.strip().removesuffix(",")  # as a tuple may be written
        pattern = [name.strip() for name in names.split(",")] if names else []
    if not isinstance(pattern, (list, tuple)):
        found = f"is {shown(pattern)}, but must be a tuple of mixers, or their names, as in flash,flash,gau."
        raise ArgumentError("pattern", found)
    mixers = [known.get(each, each) if isinstance(each, str) else each for each in pattern]
    return tuple(as_layer(f"pattern[{place}]", mixer, KINDS["mixer"]) for place, mixer in enumerate(mixers))


@dataclass(frozen=True)
class ModelConfig(PartsConfig):
    """A language model: embedding, N blocks of a mixer and an optional feed-forward layer, norm, logits.

    Attributes:
        task: "clm", a causal language model; "mlm", a masked (bidirectional) one; or "prefix-lm", a causal one that reads a
            prefix bidirectionally.
        vocab_size: number of tokens.
        d_model: width of the residual stream.
        n_blocks: number of blocks.
        mixer: the layer that moves information between tokens; with a pattern, its first one.
        feed_forward: the layer after the mixer in each block; None for models of gated attention units, which need none.
        norm: the norm of every layer and, by default, the final norm.
        norm_eps: the epsilon that `norm` adds to the mean square or variance before dividing by it.
        norm_position: "pre" for a norm before each layer; "post" for a norm after each residual connection, as in GAU-alpha.
        final_norm: the norm before the logits: "same" as `norm`; another one, with an epsilon of 1e-5; or "none".
        embedding_norm: whether the input of the first block is normalised.
        absolute_position: "scaled_sin" adds a scaled sinusoid to the embeddings; "learned" adds one learned vector for each
            position; "none" adds nothing.
        max_positions: the number of learned positions, and so the longest sequence; None for other positions.
        token_types: the number of token types, such as the two texts of a pair. Each has a learned vector that is added to
            the embeddings. 0 for none.
        tie_word_embeddings: whether the logits are computed with the transposed token embedding; otherwise with a separate
            linear layer, which has a bias.
        dropout: the dropout rate of every layer's output.
        pattern: of a hybrid, the mixers of the blocks in turn, which repeat until there are `n_blocks`; empty if every block
            has `mixer`. Any of them may be given as its name, which stands for the mixer of this kind that the model has.

    Raises:
        ArgumentError: for a value of the wrong type or out of range, or a mixer that cannot learn the task.
    """

    task: Task
    vocab_size: Annotated[int, Between(1, 2**31 - 1)]
    d_model: Annotated[int, Between(1, 2**24)]
    n_blocks: Annotated[int, Between(1, 10**6)]
    mixer: LayerConfig
    feed_forward: LayerConfig | None = None
    norm: Norm = "layernorm"
    norm_eps: Annotated[float, Between(above=0, below=1)] = 1e-5
    norm_position: NormPosition = "pre"
    final_norm: Literal["same", "layernorm", "scalenorm", "rmsnorm", "none"] = "same"
    embedding_norm: bool = False
    absolute_position: Literal["scaled_sin", "learned", "none"] = "scaled_sin"
    max_positions: Annotated[int, Between(1, 2**31 - 1)] | None = None
    token_types: Annotated[int, Between(0, 2**31 - 1)] = 0
    tie_word_embeddings: bool = True
    dropout: Annotated[float, Between(0, below=1)] = 0.0
    pattern: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern and self.pattern[0] != self.mixer:
            wanted = f"but must equal the first one of the pattern, {self.pattern[0].kind}, in all options"
            raise ArgumentError("mixer", f"is {self.mixer.kind}, {wanted}: give another pattern, or an empty one.")
        for mixer in self.mixers:
            if (why := why_not_learned(mixer.layer, self.task)) is not None:
                raise ArgumentError("task", f"is {self.task!r}, but a model of {mixer.kind} {why}")
        if (self.max_positions is not None) != (self.absolute_position == "learned"):
            raise ArgumentError(
                "max_positions",
                f"is {self.max_positions} with absolute_position = {self.absolute_position!r}, but learned positions need a "
                "number of them, and no others have one.",
            )

    def build(self) -> "CausalLM | MaskedLM":
        """Build the model, freshly initialised."""
        from lineartime.models.language_model import build_model  # which takes a config

        return build_model(self)

    @property
    def first_round(self) -> Self:
        """The same model with one block of each mixer in the pattern, which all others repeat."""
        return replace(self, n_blocks=min(self.n_blocks, len(self.mixers)))

    @property
    def longest_sequence(self) -> int | None:
        """The maximum number of tokens that the model can read, or None if there is no limit."""
        limits = [self.max_positions, *(layer.longest_sequence for layer in self._layers())]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def constant_state(self) -> bool:
        """Whether one token of each stream updates the state of all blocks in place, in constant memory."""
        return all(layer.constant_state for layer in self._layers())

    def _layers(self) -> list[Mixer]:
        """One of each mixer, as shapes alone."""
        with shapes_only():
            return [mixer.build(self.d_model, causal=self.task != "mlm") for mixer in set(self.mixers)]
