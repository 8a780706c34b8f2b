"""Decode plain data as the types of dataclasses, and check values against types and ranges.

It is our own because models are built and loaded with torch alone, and because its errors name the field, the value and what is
allowed: msgspec names no value, ignores unknown fields of dataclasses and takes infinity, and pydantic is slow to import.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lineartime.errors import ArgumentError, did_you_mean

Config = TypeVar("Config")

_SHOWN = 60
"""The maximum length of a value in a message, in characters."""
_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    NoneType: "None",
    Any: "anything",
}


@dataclass(frozen=True)
class Between:
    """The range of a number, in an annotation: `Annotated[int, Between(1, 100)]`. A float must also be finite."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def allows(self, value: Any) -> bool:
        """Whether a number is in the range."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {limit:,}" for words, limit in limits.items() if limit is not None)


@dataclass(frozen=True)
class Matching:
    """The form of a text, in an annotation: a regular expression for the whole text, and its description in words."""

    pattern: str
    words: str

    def allows(self, value: Any) -> bool:
        """Whether a text matches."""
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


Count = Annotated[int, Between(0, 10**15)]
"""A count, for instance of steps, tokens or bytes."""
AtLeastOne = Annotated[int, Between(1)]
Positive = Annotated[float, Between(above=0)]


def decode(hint: Any, value: Any, name: str = "") -> Any:
    """Convert plain data to a type: a dictionary to a dataclass, a list to a tuple, a text to a Path.

    `hint` is a dataclass, a tuple, a dictionary, a union, a Literal, a plain type or Any, optionally with a range. Raises
    ArgumentError, naming the field ("processes[2].time") below `name`, for anything unknown, missing, of the wrong type or out
    of range.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        found = decode(parts[0], value, name)
        check_limits(name, found, parts[1:])
        return found
    if kind in (Union, UnionType):
        options = [option for option in parts if option is not NoneType]
        if value is None and len(options) < len(parts):
            return None
        for option in options:
            try:
                return decode(option, value, name)
            except ArgumentError:
                if len(options) == 1:
                    raise  # it may name a part of the value
    elif dataclasses.is_dataclass(hint) and isinstance(value, dict):
        hints = _hints(hint)
        values = {field: decode(hints.get(field, Any), item, _inside(name, field)) for field, item in value.items()}
        return from_fields(cast("type[Any]", hint), values, name)
    elif kind is tuple and isinstance(value, (list, tuple)):
        return tuple(decode(parts[0], item, f"{name}[{place}]") for place, item in enumerate(value))
    elif kind is dict and isinstance(value, dict):
        return {decode(parts[0], key, name): decode(parts[1], item, _inside(name, str(key))) for key, item in value.items()}
    elif hint is Path and isinstance(value, str):
        if not value:
            raise ArgumentError(name, "is empty: give a path, or leave it out.")
        return Path(value)
    elif _is_of_type(value, hint):
        check_limits(name, value, ())
        return value
    raise ArgumentError(name or "the content", f"is {shown(value)}, but must be {describe(hint)}.")


def _is_of_type(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(hint))
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int)
    return hint is Any or (isinstance(hint, type) and get_origin(hint) is None and isinstance(value, hint))


def from_fields(cls: type[Config], values: dict[str, Any], name: str = "") -> Config:
    """Make a dataclass, which checks them, from values for its fields; an error names the field below `name`.

    Raises ArgumentError for a field that is unknown or missing.
    """
    known = _hints(cls)
    for field in values:
        if field not in known:
            problem = f"is not a field here{did_you_mean(field, known)}: there are {', '.join(known)}."
            raise ArgumentError(_inside(name, field), problem)
    for each in dataclasses.fields(cast("Any", cls)):
        if each.name not in values and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise ArgumentError(_inside(name, each.name), "is missing.")
    try:
        return cls(**values)
    except ArgumentError as error:  # raised by the dataclass itself
        raise ArgumentError(_inside(name, error.argument), error.predicate) from None


def check_fields(config: Any) -> None:
    """Check all values of a dataclass by the types and ranges of its fields, and replace lists by tuples and texts by paths.

    Raises ArgumentError, naming the field.
    """
    for name, hint in _hints(type(config)).items():
        object.__setattr__(config, name, decode(hint, getattr(config, name), name))


def check_names(names: Iterable[str], allowed: Collection[str], where: str) -> None:
    """Raise ArgumentError for a name that is not allowed."""
    for name in names:
        if name not in allowed:
            like = did_you_mean(name, allowed)
            raise ArgumentError(_inside("", name), f"is not an option of {where}{like}, which has {', '.join(allowed)}.")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ArgumentError, naming the argument, unless its value has the type of an annotation."""
    decode(hint, value, name)


def check_limits(name: str, value: Any, limits: Iterable[Any]) -> None:
    """Raise ArgumentError, naming the argument, unless its value is None or finite and within the limits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(name, f"is {value}, but must be a finite number.")
    for limit in limits:
        if value is not None and isinstance(limit, (Between, Matching)) and not limit.allows(value):
            raise ArgumentError(name, f"is {shown(value)}, but must be {limit}.")


def shown(value: object) -> str:
    """Format a value for a message, shortened if it is long."""
    try:
        return _short(repr(value))
    except (ValueError, RecursionError):  # a number with thousands of digits, or endlessly nested lists
        return f"a {type(value).__name__} that is too long to be shown"


def describe(hint: Any) -> str:
    """Describe in words what a type allows."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return ", ".join([describe(parts[0]), *map(str, parts[1:])])
    if kind is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if kind in (Union, UnionType):
        return " or ".join(map(describe, parts))
    if kind is tuple:
        return f"a list, each item of which is {describe(parts[0])}"
    if kind is dict:
        return f"an object, each value of which is {describe(parts[1])}"
    if dataclasses.is_dataclass(hint):
        return f"an object with the fields {', '.join(_hints(hint))}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _hints(cls: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass, with their ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _inside(name: str, field: str) -> str:
    """The name of a field within another field; an unprintable name is shown in quotes."""
    own = _short(field if field and field.isprintable() else repr(field))
    return f"{name}.{own}" if name else own


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 10]}... ({len(text):,} characters)"
