"""The texts NAME=VALUE by which the command line sets fields of a model and options of its layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from lineartime.choices import Task
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


def options_of(model: object, task: Task, *, all_values: bool) -> dict[str, Any]:
    """The options preset, task and override (by name) that describe a `ModelConfig`, including its vocabulary size.

    With `all_values`, values are overridden that are the preset's, too, because other options may set them. Raises
    ArgumentError for anything but a `ModelConfig`, a contradicting task, or a model that no preset resembles.
    """
    from lineartime.models.config import ModelConfig
    from lineartime.models.presets import nearest_preset, resolve, values_of

    if not isinstance(model, ModelConfig):
        raise ArgumentError("preset", f"is of type {type(model).__name__}, but must be the name of a preset, or a ModelConfig.")
    if task not in ("clm", model.task):
        raise ArgumentError("task", f"is {task!r}, but that of the ModelConfig is {model.task!r}: leave one of them out.")
    preset = nearest_preset(model)
    usual = {} if all_values else values_of(resolve(preset, model.task))
    values = {name: value for name, value in values_of(model).items() if name not in usual or usual[name] != value}
    return {"preset": preset, "task": model.task, "override": {**values, "vocab_size": model.vocab_size}}
