"""The quality of models, for the plot of quality against cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from lineartime.checkpoint import read_from, read_model_config
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import Between, decode
from lineartime.files import DamagedFileError, read_plain
from lineartime.models.config import LAYERS, ModelConfig
from lineartime.runs.table import summarize


def read_quality(sources: Sequence[Path], models: Mapping[str, ModelConfig]) -> dict[str, float]:
    """Read bits per byte by the name of a measured model; those of other models are ignored.

    Sources are folders of runs, whose best evaluation counts for their preset, or JSON files of {name: bits per byte}.

    Raises:
        LineartimeError: for a source that cannot be read, for a run that trained another model than the one measured, or if
            no source is about a measured model.
    """
    quality: dict[str, float] = {}
    others: list[str] = []
    for source in sources:
        for name, value in (_of_run(source, models) if source.is_dir() else _of_file(source)).items():
            if name in quality:
                raise ArgumentError("metrics", f"has two numbers for {name}: give one.")
            if name in models:
                quality[name] = value
            else:
                others.append(name)
    if sources and not quality:
        found = ", ".join(others) or "no model"
        raise ArgumentError("metrics", f"has results for {found}, but none of these models is measured.")
    return quality


def _of_run(run: Path, models: Mapping[str, ModelConfig]) -> dict[str, float]:
    """The bits per byte of a run, by its preset; raises ArgumentError if another model is measured under this preset."""
    summary, problems = summarize(run, run.name)
    preset = summary.options.get("preset")
    if summary.bits_per_byte is None or preset is None:
        if problems:
            raise LineartimeError(problems[0])
        found = f"has {run}, which holds no bits per byte"
        raise ArgumentError("metrics", f"{found}: give the folder of a causal run with evaluations.")
    if preset in models:
        there, here = _flat(read_from(run, read_model_config, "last")), _flat(models[preset])
        names = [name for name in there | here if there.get(name) != here.get(name)]
        if names:
            different = ", ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names)
            raise ArgumentError(
                "metrics",
                f"has {run}, whose {preset} is not the one measured here: {different}; measure the model of the run (override, "
                "vocab_size), or leave the run out.",
            )
    return {preset: summary.bits_per_byte}


def _flat(model: ModelConfig) -> dict[str, Any]:
    """The fields of a model and the options of its layers, which are named like mixer.d_qk."""
    fields = {name: value for name, value in vars(model).items() if name not in LAYERS}
    for name, layer in model.layers.items():
        fields |= {f"{name}.{option}": value for option, value in layer.to_dict().items()}
    return fields


def _of_file(file: Path) -> dict[str, float]:
    try:
        quality: dict[str, float] = decode(dict[str, Annotated[float, Between(above=0)]], read_plain(file))
    except (DamagedFileError, ArgumentError):
        found = f"has {file}, which is not JSON of the form {{preset: bits per byte}}"
        raise ArgumentError("metrics", f"{found}: correct the file.") from None
    return quality
