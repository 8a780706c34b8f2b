"""How good models are, for the plot of quality against cost."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from lineartime.errors import ArgumentError, LineartimeError, cannot
from lineartime.runs.summary import summarize


def read_quality(sources: Sequence[Path], names: Sequence[str]) -> dict[str, float]:
    """Bits per byte by the name of a preset.

    Args:
        sources: folders of runs, of which the best evaluation counts, or JSON files of {preset: bits per byte}.
        names: the presets that are measured.

    Raises:
        LineartimeError: for a source that cannot be read, or if no source is about a measured preset.
    """
    quality: dict[str, float] = {}
    for source in sources:
        for name, value in (_of_run(source) if source.is_dir() else _of_file(source)).items():
            if name in quality:
                raise ArgumentError("metrics", f"has two numbers for {name}: give one.")
            quality[name] = value
    if sources and not quality.keys() & set(names):
        raise ArgumentError("metrics", f"is about {', '.join(quality) or 'nothing'}, but none of this is measured here.")
    return {name: value for name, value in quality.items() if name in names}


def _of_run(run: Path) -> dict[str, float]:
    summary, problems = summarize(run, run.name)
    if summary.bits_per_byte is None or "preset" not in summary.options:
        if problems:
            raise LineartimeError(problems[0])
        raise ArgumentError(
            "metrics", f"has {run}, which holds no bits per byte: give the folder of a causal run with evaluations."
        )
    return {summary.options["preset"]: summary.bits_per_byte}


def _of_file(file: Path) -> dict[str, float]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot("read", file, error) from None
    except ValueError:
        values = None
    if not isinstance(values, dict) or not all(_is_number(value) for value in values.values()):
        raise ArgumentError(
            "metrics", f"has {file}, which is not JSON of the form {{preset: bits per byte}}: correct the file."
        )
    return {name: float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
