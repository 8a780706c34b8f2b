"""Dataclasses whose fields are checked against their types, so that a wrong value is named where it is given."""

import dataclasses
from collections.abc import Collection, Iterable
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lineartime.errors import ArgumentError, did_you_mean

Config = TypeVar("Config")


def from_fields(cls: type[Config], values: dict[str, Any], where: str) -> Config:
    """Make a dataclass of its fields; ArgumentError, naming the field, for one that is unknown, missing or of the wrong type.

    Args:
        cls: the dataclass.
        values: its fields by name.
        where: what an error calls the whole: "the model", for instance.
    """
    # That a type is a dataclass cannot be said in its bound.
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    check_names(values, fields, where)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ArgumentError(name, f"is missing in {where}.")
    config = cls(**values)
    check_fields(config)
    return config


def check_fields(config: Any) -> None:
    """Raise ArgumentError, naming the field, unless every value of a dataclass has the type its field states."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        check_type(field.name, getattr(config, field.name), hints[field.name])


def check_names(names: Iterable[str], allowed: Collection[str], where: str) -> None:
    """Raise ArgumentError for a name that is not allowed."""
    for name in names:
        if name not in allowed:
            like = did_you_mean(name, allowed)
            raise ArgumentError(name, f"is not an option of {where}{like}, which has {', '.join(allowed)}.")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ArgumentError, naming the argument, unless its value has the type that an annotation states."""
    if not _fits(value, hint):
        raise ArgumentError(name, f"is {value!r}, but must be {_describe(hint)}.")


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
    if get_origin(hint) is tuple:
        return f"a list, each item of which is {_describe(get_args(hint)[0])}"
    if hint is type(None):
        return "None"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
