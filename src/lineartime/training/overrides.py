"""The texts NAME=VALUE by which the command line sets fields of a model and options of its layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from lineartime.errors import ArgumentError
from lineartime.units import number_or_text


@contextmanager
def errors_in_override(*own: str) -> Iterator[None]:
    """Turn a ValueError about a field of the model into one about the argument `override`, except for `own` options."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ArgumentError) and error.argument in own:
            raise
        raise ArgumentError("override", f"does not fit the model: {error}") from None


def read_override(item: str) -> tuple[str, Any]:
    """The name and the value in NAME=VALUE: a number, true, false, none, or a text."""
    name, equals, text = item.partition("=")
    if not equals:
        raise ArgumentError("override", f"contains {item!r}, which is not of the form NAME=VALUE, for instance chunk_size=64.")
    if text == "none" and name in ("absolute_position", "final_norm"):  # "none" is one of their values
        return name, text
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return name, words[text.lower()]
    return name, number_or_text(text)


def written(values: Mapping[str, Any]) -> list[str]:
    """Fields of a model as the command line writes them: NAME=VALUE."""
    return [f"{name}={_value(value)}" for name, value in values.items()]


def _value(value: object) -> str:
    """A value as `read_override` reads it back."""
    if isinstance(value, tuple):  # an option of this type reads the text
        return ",".join(map(_value, value)) or ","
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def merged_override(*overrides: Sequence[str]) -> tuple[str, ...]:
    """Merge overrides field by field; later ones win."""
    return tuple({item.partition("=")[0]: item for item in chain(*overrides)}.values())
