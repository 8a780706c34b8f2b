"""Express a model that is given as plain data, not as the name of a preset, by options that a run can record."""

from typing import Any

from lineartime.choices import Task
from lineartime.errors import ArgumentError
from lineartime.models.config import ModelConfig
from lineartime.models.layer_config import LayerConfig
from lineartime.models.presets import nearest_preset, resolve, values_of


def options_of(model: object, task: Task, *, all_values: bool) -> dict[str, Any]:
    """The options preset, task and override (by name) that describe a model, including its vocabulary size.

    Args:
        model: a `ModelConfig`.
        task: the task option that was given with the model; the default, "clm", is replaced by the model's own task.
        all_values: whether to override every value, not only those that differ from the preset's, because other options may
            set values too.

    Raises:
        ArgumentError: for anything but a `ModelConfig`, a contradicting task, or a model that no preset resembles.
    """
    if isinstance(model, LayerConfig):
        raise ArgumentError(
            "preset", f"is {model!r}, which describes one layer: give a ModelConfig that has it, or the name of a preset."
        )
    if not isinstance(model, ModelConfig):
        raise ArgumentError("preset", f"is of type {type(model).__name__}, but must be the name of a preset, or a ModelConfig.")
    if task not in ("clm", model.task):
        raise ArgumentError("task", f"is {task!r}, but that of the ModelConfig is {model.task!r}: leave one of them out.")
    preset = nearest_preset(model)
    usual = {} if all_values else values_of(resolve(preset, model.task))
    values = {name: value for name, value in values_of(model).items() if name not in usual or usual[name] != value}
    return {"preset": preset, "task": model.task, "override": {**values, "vocab_size": model.vocab_size}}
