"""The quality of models, for the plot of quality against cost."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lineartime.checkpoint import read_from, read_model_config
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.json_files import DamagedFileError, read_plain
from lineartime.models.config import ModelConfig
from lineartime.runs.summary import summarize


def read_quality(sources: Sequence[Path], models: Mapping[str, ModelConfig]) -> tuple[dict[str, float], list[str]]:
    """Read bits per byte by the name of a measured model, and the names that the sources have of other models.

    Args:
        sources: folders of runs, whose best evaluation is used, or JSON files of {name: bits per byte}.
        models: the measured models by name. A run counts for its preset, and must have trained exactly the measured model.

    Raises:
        LineartimeError: for a source that cannot be read, for a run that trained another model than the one measured, or if
            no source is about a measured model.
    """
    quality: dict[str, float] = {}
    strangers: list[str] = []
    for source in sources:
        found = _of_run(source, models) if source.is_dir() else _of_file(source)
        for name, value in found.items():
            if name in quality:
                raise ArgumentError("metrics", f"has two numbers for {name}: give one.")
            if name in models:
                quality[name] = value
            else:
                strangers.append(name)
    if sources and not quality:
        models_named = ", ".join(strangers) or "no model"
        raise ArgumentError("metrics", f"has results for {models_named}, but none of these models is measured.")
    return quality, strangers


def _of_run(run: Path, models: Mapping[str, ModelConfig]) -> dict[str, float]:
    """The bits per byte of a run, by its preset; raises ArgumentError if another model is measured under this preset."""
    summary, problems = summarize(run, run.name)
    preset = summary.options.get("preset")
    if summary.bits_per_byte is None or preset is None:
        if problems:
            raise LineartimeError(problems[0])
        raise ArgumentError(
            "metrics", f"has {run}, which holds no bits per byte: give the folder of a causal run with evaluations."
        )
    if preset not in models:
        return {preset: summary.bits_per_byte}
    different = _differences(read_from(run, read_model_config, "last"), models[preset])
    if different:
        raise ArgumentError(
            "metrics",
            f"has {run}, whose {preset} is not the one measured here: {', '.join(different)}; measure the model of the run "
            "(override, vocab_size), or leave the run out.",
        )
    return {preset: summary.bits_per_byte}


def _differences(trained: ModelConfig, measured: ModelConfig) -> list[str]:
    """The differences between two models, in words."""
    there, here = _flat(trained.to_dict()), _flat(measured.to_dict())
    names = [name for name in dict.fromkeys([*there, *here]) if there.get(name) != here.get(name)]
    return [f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names]


def _flat(description: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model and the options of its layers, which are named like mixer.d_qk."""
    fields: dict[str, Any] = {}
    for name, value in description.items():
        fields |= {f"{name}.{option}": its for option, its in value.items()} if isinstance(value, dict) else {name: value}
    return fields


def _of_file(file: Path) -> dict[str, float]:
    try:
        values = read_plain(file)
    except DamagedFileError:
        values = None
    if values is None or not all(_is_number(value) for value in values.values()):
        raise ArgumentError(
            "metrics", f"has {file}, which is not JSON of the form {{preset: bits per byte}}: correct the file."
        )
    return {name: float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
