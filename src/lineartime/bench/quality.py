"""How good models are, from what training left: for the plot of quality against cost."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from lineartime.checkpoint import best_checkpoint
from lineartime.errors import LineartimeError, cannot
from lineartime.runs.metrics import METRICS_FILE, read_metrics
from lineartime.training.resuming import saved_config


def read_quality(sources: Sequence[Path], names: Sequence[str]) -> dict[str, float]:
    """Bits per byte by the name of a preset.

    Args:
        sources: folders of runs, of which the best evaluation is taken, or JSON files of {preset: bits per byte}.
        names: the presets that are measured.

    Raises:
        LineartimeError: for a source that cannot be read, or if none is about a preset that is measured.
    """
    quality: dict[str, float] = {}
    for source in sources:
        for name, value in (_of_run(source) if source.is_dir() else _of_file(source)).items():
            if name in quality:
                raise LineartimeError(f"--metrics has two numbers for {name}: give one.")
            quality[name] = value
    if sources and not quality.keys() & set(names):
        raise LineartimeError(f"--metrics is about {', '.join(quality) or 'nothing'}, of which none is measured here.")
    return {name: value for name, value in quality.items() if name in names}


def _of_run(run: Path) -> dict[str, float]:
    preset = saved_config(best_checkpoint(run)).preset
    try:
        found = [line["validation_bits_per_byte"] for line in read_metrics(run) if "validation_bits_per_byte" in line]
    except OSError as error:
        raise cannot("read", run / METRICS_FILE, error) from None
    if not found:
        raise LineartimeError(f"--metrics {run} has no bits per byte: give the folder of a causal run that was evaluated.")
    return {preset: min(found)}


def _of_file(file: Path) -> dict[str, float]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot("read", file, error) from None
    except ValueError:
        values = None
    if not isinstance(values, dict) or not all(_is_number(value) for value in values.values()):
        raise LineartimeError(f"--metrics {file} is not JSON of the form {{preset: bits per byte}}: mend it, or give a run.")
    return {name: float(value) for name, value in values.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
