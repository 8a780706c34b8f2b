"""Check the fields of dataclasses against their types and ranges, so that errors name the wrong value.

`decode` makes dataclasses from plain JSON data. Every file that the library writes and reads back is read with it. It is our
own because checkpoints must load with only torch and safetensors installed, and because its errors name the wrong value.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lineartime.errors import ArgumentError, did_you_mean

Config = TypeVar("Config")

_SHOWN = 60
"""The maximum length of a value in a message, in characters."""


@dataclass(frozen=True)
class Between:
    """The range of a number, in an annotation: `Annotated[int, Between(1, 100)]`. A float must also be finite.

    Attributes:
        least: the smallest allowed number.
        most: the largest allowed number.
        above: a limit that the number must exceed.
        below: a limit that the number must stay below.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def allows(self, value: Any) -> bool:
        """Whether a number is in the range. None is always allowed here: types decide on it."""
        return value is None or (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{words} {_number(limit)}" for words, limit in limits.items() if limit is not None)


@dataclass(frozen=True)
class Matching:
    """The form of a text, in an annotation: a regular expression for the whole text, and its description in words."""

    pattern: str
    words: str

    def allows(self, value: Any) -> bool:
        """Whether a text matches. None is always allowed here: types decide on it."""
        return value is None or re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return self.words


Count = Annotated[int, Between(0, 10**15)]
"""A count, for instance of steps, tokens or bytes."""
AtLeastOne = Annotated[int, Between(1)]
Positive = Annotated[float, Between(above=0)]
_ANY_NUMBER = Between(-(2**63), 2**64 - 1)
Digest = Annotated[str, Matching("[0-9a-f]{64}", "a SHA-256 in 64 hexadecimal digits")]


def decode(hint: Any, value: Any, name: str = "") -> Any:
    """Convert plain data to a type: a dictionary to a dataclass, a list to a tuple, a text to a Path.

    Args:
        hint: a dataclass, a tuple, a dictionary, a union, a Literal, a plain type or Any, optionally with a range.
        value: the plain data.
        name: the name of the value in errors. If it is empty, the fields of a dataclass are named by their own names alone.

    Raises:
        ArgumentError: naming the field ("processes[2].time"), for anything unknown, missing, of the wrong type or out of range.
    """
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        found = decode(base, value, name)
        check_limits(name, found, limits)
        return found
    if get_origin(hint) in (Union, UnionType):
        return _decode_union(hint, value, name)
    if dataclasses.is_dataclass(hint):
        return _decode_fields(hint, value, name)
    if get_origin(hint) is tuple:
        _check(isinstance(value, (list, tuple)), name, value, hint)
        return tuple(decode(get_args(hint)[0], item, f"{name}[{place}]") for place, item in enumerate(value))
    if get_origin(hint) is dict:
        _check(isinstance(value, dict), name, value, hint)
        key_hint, item_hint = get_args(hint)
        return {
            decode(key_hint, key, f"a name in {name or 'the file'}"): decode(item_hint, item, _inside(name, key))
            for key, item in value.items()
        }
    if hint is Any:
        _check_plain(value, name)
        return value
    if hint is Path and isinstance(value, str):
        value = Path(decode(str, value, name))
    check_type(name, value, hint)
    _check_text(name, value)
    if hint in (int, float):
        check_limits(name, value, [_ANY_NUMBER] if hint is int else [])
    return value


def _decode_union(hint: Any, value: Any, name: str) -> Any:
    if value is None:
        _check(type(None) in get_args(hint), name, value, hint)
        return None
    options = [option for option in get_args(hint) if option is not type(None)]
    for option in options:
        try:
            return decode(option, value, name)
        except ArgumentError:
            if len(options) == 1 and _fits_shallowly(value, option):
                raise  # it names the part that is wrong
    raise ArgumentError(name, f"is {shown(value)}, but must be {describe(hint)}.")


def _fits_shallowly(value: Any, hint: Any) -> bool:
    """Whether a value has the outer type of a hint, regardless of its parts."""
    base = _without_annotation(hint)
    if dataclasses.is_dataclass(base) or get_origin(base) is dict:
        return isinstance(value, dict)
    return isinstance(value, (list, tuple)) if get_origin(base) is tuple else base is not Any and _fits(value, base)


def _decode_fields(cls: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ArgumentError(name or "the content", f"is {shown(value)}, but must be {describe(cls)}.")
    where = name or "the file"
    hints = _hints(cls)
    for field in value:
        if field not in hints:
            like = did_you_mean(field, hints)
            raise ArgumentError(_inside(name, field), f"is not a field of {where}{like}, which has {', '.join(hints)}.")
    _check_complete(cls, value, where)
    values = {field: decode(hints[field], item, _inside(name, field)) for field, item in value.items()}
    try:
        return cls(**values)
    except ArgumentError as error:  # raised by the dataclass itself
        raise ArgumentError(_inside(name, error.argument), *error.predicate) from None


def from_fields(cls: type[Config], values: dict[str, Any], where: str) -> Config:
    """Make a dataclass from its fields. Raises ArgumentError, naming a field that is unknown, missing or of the wrong type.

    Args:
        cls: the dataclass.
        values: its fields by name.
        where: the name of the whole in errors, for instance "the model".
    """
    check_names(values, _hints(cls), where)
    _check_complete(cls, values, where)
    config = cls(**values)
    check_fields(config)
    return config


def check_fields(config: Any) -> None:
    """Raise ArgumentError, naming the field, unless every value of a dataclass has the type of its field.

    Texts and paths must also be ones that a file can hold.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        check_type(name, value, hint)
        for item in value if isinstance(value, tuple) else (value,):
            _check_text(name, item)


def check_ranges(config: Any) -> None:
    """Raise ArgumentError, naming the field, unless every value of a dataclass is in the range of its field."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        several = get_origin(hint) is tuple
        each = get_args(hint)[0] if several else hint
        limits = [limit for part in _parts(each) for limit in getattr(part, "__metadata__", ())]
        for item in value if several else (value,):
            check_limits(name, item, limits)


def set_plain(config: Any) -> None:
    """Convert lists and texts given for tuples and paths of a frozen dataclass, in its `__post_init__`. An empty path fails."""
    for name, hint in _hints(type(config)).items():
        value, base = getattr(config, name), _without_annotation(hint)
        if get_origin(base) is tuple and isinstance(value, list):
            object.__setattr__(config, name, tuple(value))
        elif isinstance(value, str) and Path in _parts(base):
            if not value:
                raise ArgumentError(name, "is empty: give a path, or leave it out.")
            object.__setattr__(config, name, Path(value))


def check_names(names: Iterable[str], allowed: Collection[str], where: str) -> None:
    """Raise ArgumentError for a name that is not allowed."""
    for name in names:
        if name not in allowed:
            like = did_you_mean(name, allowed)
            raise ArgumentError(_inside("", name), f"is not an option of {where}{like}, which has {', '.join(allowed)}.")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ArgumentError, naming the argument, unless its value has the type of an annotation."""
    _check(_fits(value, hint), name, value, hint)


def shown(value: object) -> str:
    """Format a value for a message, shortened if it is long."""
    try:
        return _short(repr(value))
    except (ValueError, RecursionError):  # a number with thousands of digits, or endlessly nested lists
        return f"a {type(value).__name__} that is too long to be shown"


def describe(hint: Any) -> str:
    """Describe in words what a type allows."""
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        return ", ".join([describe(base), *map(str, limits)])
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe(option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, each item of which is {describe(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"an object, each value of which is {describe(get_args(hint)[1])}"
    if dataclasses.is_dataclass(hint):
        return f"an object with the fields {', '.join(_hints(hint))}"
    if hint is type(None):
        return "None"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Any: "anything"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _number(limit: float) -> str:
    """Format a limit; a large power of two is written as a power."""
    whole = int(limit)
    return f"2^{whole.bit_length() - 1}" if whole > 10**12 and whole & (whole - 1) == 0 else f"{limit:,}"


def _read_hints(cls: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass, with their ranges."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


_hints: Callable[[Any], dict[str, Any]] = cache(_read_hints)  # to type checkers, a class is not hashable


def _inside(name: str, field: str) -> str:
    """The name of a field within another field; an unprintable name is shown in quotes."""
    own = _short(field if field and field.isprintable() else repr(field))
    return f"{name}.{own}" if name else own


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 10]}... ({len(text):,} characters)"


def _check_complete(cls: Any, values: Collection[str], where: str) -> None:
    """Raise ArgumentError for a field without a default that has no value."""
    for field in dataclasses.fields(cls):
        if field.name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ArgumentError(field.name, f"is missing in {where}.")


def _check(right: bool, name: str, value: Any, hint: Any) -> None:
    if not right:
        raise ArgumentError(name or "the content", f"is {shown(value)}, but must be {describe(hint)}.")


def _check_text(name: str, value: Any) -> None:
    """Raise ArgumentError for a text or path with a null character or a lone surrogate, which no file can hold."""
    if not isinstance(value, (str, Path)):
        return
    text = str(value)
    try:
        text.encode("utf-8", "surrogateescape")  # as Python represents bytes in paths that are not UTF-8
    except UnicodeEncodeError:
        raise ArgumentError(name, f"is {shown(text)}, but must be a text that UTF-8 can hold.") from None
    if "\0" in text:
        raise ArgumentError(name, f"is {shown(text)}, but must be a text without the character zero.")


def check_limits(name: str, value: Any, limits: Iterable[Any]) -> None:
    """Raise ArgumentError, naming the argument, unless its value is finite and within the limits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ArgumentError(name, f"is {value}, but must be a finite number.")
    for limit in limits:
        if isinstance(limit, (Between, Matching)) and not limit.allows(value):
            raise ArgumentError(name, f"is {shown(value)}, but must be {limit}.")


def _check_plain(value: Any, name: str) -> None:
    """Raise ArgumentError if nested plain data holds a number that is not finite or too large for 64 bits."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(item, _inside(name, key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            _check_plain(item, f"{name}[{place}]")
    elif isinstance(value, float):
        check_limits(name, value, [])
    elif isinstance(value, int):
        check_limits(name, value, [_ANY_NUMBER])


def _without_annotation(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _parts(hint: Any) -> Iterator[Any]:
    """A hint and, for a union, its options."""
    yield hint
    if get_origin(hint) in (Union, UnionType):
        yield from get_args(hint)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _fits(value, get_args(hint)[0])
    if get_origin(hint) is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_fits(item, get_args(hint)[1]) for item in value.values())
    if hint is Any:
        return True
    if hint in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, float) if hint is float else int)
    return isinstance(value, cast("type[Any]", hint))
