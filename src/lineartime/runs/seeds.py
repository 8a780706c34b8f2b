"""Runs that differ only in the seed, as one row: means, and how far the seeds are apart."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lineartime.runs.curve import DEVIATION
from lineartime.runs.metrics import Line
from lineartime.runs.record import WITHOUT_EFFECT
from lineartime.runs.summary import RunSummary

_OF_A_RUN = ("seed", *WITHOUT_EFFECT)
"""Options that may differ between the seeds of one setting."""
_MEANS = ("training_loss", "validation_loss", "bits_per_byte", "tokens_per_second", "seconds", "waiting")
"""What a merged run has as the mean of its runs."""


def merge_seeds(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Merge runs that differ only in the seed and have taken as many steps; the others stay as they are.

    Only runs with an evaluation are merged, and only one of each seed. A merged run has the means of its runs, the standard
    deviation of their losses, and the name of the first.
    """
    settings: dict[str, list[RunSummary]] = {}
    seen: set[str] = set()
    for place, run in enumerate(runs):
        options = {name: value for name, value in run.options.items() if name not in _OF_A_RUN}
        options["override"] = sorted(map(str, options.get("override") or ()))
        key = json.dumps([sorted(options.items()), run.tokenizer, run.step])
        with_seed = f"{key} {run.options.get('seed')}"
        if not run.options or run.validation_loss is None or run.options.get("seed") is None or with_seed in seen:
            key = str(place)
        seen.add(with_seed)
        settings.setdefault(key, []).append(run)
    return [_merged(of_setting) if len(of_setting) > 1 else of_setting[0] for of_setting in settings.values()]


def _merged(runs: Sequence[RunSummary]) -> RunSummary:
    runs = sorted(runs, key=lambda run: (run.options["seed"], run.name))
    first, states = runs[0], Counter(run.state for run in runs)
    state = first.state if len(states) == 1 else ", ".join(f"{count} {state}" for state, count in states.items())
    means: dict[str, Any] = {name: _over(statistics.fmean, runs, name) for name in _MEANS}
    return replace(
        first,
        options={name: value for name, value in first.options.items() if name not in _OF_A_RUN},
        **means,
        skipped=sum(run.skipped for run in runs),
        state=state,
        error=next((run.error for run in runs if run.error), None),
        silent_seconds=min(run.silent_seconds for run in runs),
        lines=_mean_lines([run.lines for run in runs]),
        seeds=tuple(run.options["seed"] for run in runs),
        validation_deviation=_over(statistics.stdev, runs, "validation_loss"),
        bits_deviation=_over(statistics.stdev, runs, "bits_per_byte"),
        paths=tuple(run.path for run in runs),
    )


def _over(statistic: Callable[[list[float]], float], runs: Sequence[RunSummary], name: str) -> float | None:
    """A statistic of a number of runs; None if one of them lacks the number."""
    values = [getattr(run, name) for run in runs]
    return None if None in values else statistic(values)


def _mean_lines(of_runs: Sequence[Sequence[Line]]) -> list[Line]:
    """The mean of each number at the steps and evaluations that all runs have."""
    by_step = [{("validation_loss" in line, line["step"]): line for line in lines} for lines in of_runs]
    common = [key for key in by_step[0] if all(key in lines for lines in by_step)]
    merged: list[Line] = []
    for key in common:
        lines = [lines[key] for lines in by_step]
        names = [name for name in lines[0] if all(name in line for line in lines)]
        means = {name: statistics.fmean(line[name] for line in lines) for name in names}
        losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
        merged.append({**means, DEVIATION: statistics.stdev(losses)} if losses else means)
    return merged
