"""A model described by frozen dataclasses, each of which builds what it describes."""

import dataclasses
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lineartime.layers import GLU, MLP
from lineartime.layers.checks import check_positive
from lineartime.layers.norms import Norm
from lineartime.layers.residual import ResidualLayer
from lineartime.models.mixers import MIXER_KINDS, CrossGAUConfig, MixerConfig

Task = Literal["clm", "mlm"]
Config = TypeVar("Config")


@dataclass(frozen=True)
class MLPConfig:
    """Two linear maps with a GELU between them."""

    expansion: int = 4

    def build(self, d_model: int, *, norm: Norm, dropout: float) -> ResidualLayer:
        """The layer this describes."""
        return MLP(d_model, expansion=self.expansion, norm=norm, dropout=dropout)


@dataclass(frozen=True)
class GLUConfig:
    """Gated linear unit with GELU, as large as an MLP of the same expansion."""

    expansion: int = 4

    def build(self, d_model: int, *, norm: Norm, dropout: float) -> ResidualLayer:
        """The layer this describes."""
        return GLU(d_model, expansion=self.expansion, norm=norm, dropout=dropout)


FeedForwardConfig = MLPConfig | GLUConfig

# The names under which parts appear in dictionaries, beside their own fields, as "kind".
KINDS: dict[str, dict[str, type]] = {
    "mixer": {**MIXER_KINDS},
    "feed_forward": {"mlp": MLPConfig, "glu": GLUConfig},
    "cross": {"gau": CrossGAUConfig},
}


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
    """

    task: Task
    vocab_size: int
    d_model: int
    n_blocks: int
    mixer: MixerConfig
    feed_forward: FeedForwardConfig | None = None
    norm: Norm = "layernorm"
    absolute_position: Literal["scaled_sin", "learned", "none"] = "scaled_sin"
    max_positions: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "model")
        check_positive(vocab_size=self.vocab_size, d_model=self.d_model, n_blocks=self.n_blocks)
        if (self.max_positions is not None) != (self.absolute_position == "learned"):
            raise ValueError(
                f"model.max_positions is {self.max_positions} with absolute_position = {self.absolute_position!r}, but learned "
                "positions need a number of them, and no others have one."
            )
        if self.max_positions is not None:
            check_positive(max_positions=self.max_positions)

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that the model can read, or None where there is no limit."""
        limits = [limit for limit in (self.max_positions, self.mixer.longest_sequence) if limit is not None]
        return min(limits, default=None)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary for JSON, from which `from_dict` makes an equal config."""
        return config_to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelConfig":
        """The config that `to_dict` described; ValueError naming the field for anything unknown or of the wrong type."""
        return config_from_dict(cls, data)

    def override(self, /, **values: Any) -> "ModelConfig":
        """A copy with other values: a field of the model, or one of its mixer or feed-forward under its own name.

        `config.override(vocab_size=32000, chunk_size=512)`; ValueError for a name that no part of this config has.
        """
        own = {field.name for field in dataclasses.fields(self)}
        changed: dict[str, Any] = {name: value for name, value in values.items() if name in own}
        config = config_from_dict(ModelConfig, {**_shallow(self), **changed})
        for name, value in values.items():
            if name not in own:
                config = _override_part(config, name, value)
        return config


def _override_part(config: ModelConfig, name: str, value: Any) -> ModelConfig:
    parts = [part for part in KINDS if name in _shallow(getattr(config, part, None))]
    if not parts:
        allowed = list(_shallow(config))
        for part in KINDS:
            allowed += _shallow(getattr(config, part, None))
        raise ValueError(f"{name!r} is not a field of this model; it has {', '.join(dict.fromkeys(allowed))}.")
    if len(parts) > 1:
        raise ValueError(f"{name!r} is a field of both {' and '.join(parts)}: override the whole part, for instance mixer=....")
    old = getattr(config, parts[0])
    new = from_fields(type(old), {**_shallow(old), name: value}, parts[0])
    return from_fields(ModelConfig, {**_shallow(config), parts[0]: new}, "model")


def _shallow(config: Any) -> dict[str, Any]:
    """The fields of a dataclass by their names; of None, none."""
    return {} if config is None else {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def config_to_dict(config: Any) -> dict[str, Any]:
    """A plain dictionary for JSON of a config and of its parts, each with its kind."""
    data = dataclasses.asdict(config)
    for part, kinds in KINDS.items():
        value = getattr(config, part, None)
        if value is not None:
            data[part] = {"kind": next(name for name, cls in kinds.items() if type(value) is cls), **data[part]}
    return data


def config_from_dict(cls: type[Config], data: dict[str, Any]) -> Config:
    """The config that `config_to_dict` described; ValueError naming the field for anything unknown or of the wrong type."""
    parts = {part: _part_from_dict(part, data[part]) for part in KINDS if isinstance(data.get(part), dict)}
    return from_fields(cls, {**data, **parts}, "model")


def _part_from_dict(part: str, data: dict[str, Any]) -> Any:
    kinds = KINDS[part]
    if data.get("kind") not in kinds:
        raise ValueError(f"{part}.kind is {data.get('kind')!r}, but must be one of {', '.join(map(repr, kinds))}.")
    return from_fields(kinds[data["kind"]], {name: value for name, value in data.items() if name != "kind"}, part)


def from_fields(cls: type[Config], values: dict[str, Any], where: str) -> Config:
    """Make a dataclass of its fields; ValueError naming the field for one that is unknown, missing or of the wrong type."""
    # That a type is a dataclass cannot be said in its bound.
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ValueError(f"{where} has no field {name!r}; it has {', '.join(fields)}.")
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} lacks the field {name!r}.")
    config = cls(**values)
    check_fields(config, where)
    return config


def check_fields(config: Any, where: str) -> None:
    """Raise ValueError, naming the field, unless every value of a dataclass has the type its field states."""
    hints = get_type_hints(type(config))
    for name in _shallow(config):
        value, hint = getattr(config, name), hints[name]
        if name in KINDS and value is not None and type(value) not in KINDS[name].values():
            raise ValueError(f"{where}.{name} is {value!r}, but must be a config of one of the kinds {', '.join(KINDS[name])}.")
        if not _fits(value, hint):
            raise ValueError(f"{where}.{name} is {value!r}, but must be {_describe(hint)}.")


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if hint is type(None):
        return "None"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
