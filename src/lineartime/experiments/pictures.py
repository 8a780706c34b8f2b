"""The pictures of a report."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from lineartime.experiments.catalogue import Setting
from lineartime.experiments.collect import (
    Report,
    SettingRows,
    SystemRow,
    TestMetric,
    baseline_row,
    metric_of_report,
    metric_of_test,
    values_of_row,
)
from lineartime.experiments.plan import Plan
from lineartime.plots import Panel, draw_panels, label_axes, legend_below, new_panels, save_figure

_COLOURS = [*(f"C{number}" for number in range(10)), "black", "gold", "navy"]
_MARKERS = "osD^v<>PX*dph"
CURVES = (
    "Loss on held-out text by the time of training, without evaluations and compilation, at the speed that was measured alone. "
    "Dotted: the final quality of {base}, which the speed-up refers to. Thin lines are further seeds."
)
CONTEXTS = "Final quality by the length of the context, here and in the paper."
CHUNKS = "Quality by the size of chunks in the test; circled: as trained."
LENGTHS = "Accuracy by the length of a text, of models that were trained at that length."
STATES = "Accuracy by the bytes of the state of one stream, at the longest text of each task."
LONGER = "Accuracy by the length of a text in the test; circled: as trained."
LATENCY = "Time of a token by the length of the context, here and in the paper."


def draw_pictures(plan: Plan, report: Report) -> list[tuple[Path, str]]:
    """Draw all pictures for which there are numbers, and return each with its caption. LineartimeError without matplotlib."""

    def draw(panels: Sequence[Panel], x: str, log: bool = False) -> Any:
        return draw_panels(panels, x, _looks(plan, (name for panel in panels for name in panel.curves)), log=log)

    if plan.experiment.kind == "latency":
        figures = [("latency", draw(_latency(report), "tokens of context", log=True), LATENCY)]
    elif plan.experiment.kind == "memory":
        figures = [
            ("lengths", draw(_accuracies(plan, report, lambda setting, row: setting.context), "tokens of a text"), LENGTHS),
            ("states", draw(_accuracies(plan, report, lambda _, row: row["state_bytes"], last=True), "bytes of state"), STATES),
        ]
        if plan.config.longer:
            panels = _tested(
                report,
                ("accuracy", "accuracy"),
                lambda setting: {name: times * setting["context"] for name, times in plan.longer_tests.items()},
                lambda setting, _: setting["context"],
            )
            figures.append(("longer", draw(panels, "tokens of a text in the test"), LONGER))
        for axes in (axes for _, figure, _ in figures if figure is not None for axes in figure.axes):
            axes.set_ylim(-0.05, 1.05)
    else:
        figures = [
            ("quality", _curves(plan, report), CURVES.format(base=plan.experiment.baseline)),
            ("contexts", draw(_contexts(plan, report), "tokens of context"), CONTEXTS),
        ]
        if len(plan.experiment.tests) > 2:
            sizes = {test.name: test.chunk_size for test in plan.experiment.tests if test.chunk_size is not None}
            panels = _tested(report, metric_of_report(plan), lambda _: sizes, lambda _, row: row["chunk_size"])
            figures.append(("tests", draw(panels, "tokens of a chunk in the test"), CHUNKS))
    drawn = []
    for name, figure, caption in figures:
        file = plan.folder / f"{name}.png"
        if figure is None:
            file.unlink(missing_ok=True)  # of an earlier report, perhaps
        else:
            drawn.append((save_figure(figure, file, 130), caption))
    return drawn


def _contexts(plan: Plan, report: Report) -> list[Panel]:
    """Final quality by context: a panel for each text with two contexts or more, and one of the paper."""
    metric, unit = metric_of_report(plan)
    panels = {setting["text"]: Panel(f"{setting['text']}, test split", unit) for setting in report["settings"]}
    paper = Panel("the paper", "perplexity")
    for setting in report["settings"]:
        for row in setting["rows"]:
            found = values_of_row(row, metric_of_test("", metric))
            panels[setting["text"]].add(row["name"], setting["context"], statistics.fmean(found) if found else None)
            paper.add(row["name"], setting["context"], row["paper"].get("pplx"))
    shown = [panel for panel in panels.values() if len(panel.places) > 1]
    return [*shown, paper] if shown and len(paper.places) > 1 else shown


def _tested(
    report: Report,
    metric: tuple[TestMetric, str],
    places: Callable[[SettingRows], Mapping[str, int]],
    trained: Callable[[SettingRows, SystemRow], int | None],
) -> list[Panel]:
    """A metric by the places of the tests of each name: a panel for each setting; circled: as trained."""
    panels = []
    for setting in report["settings"]:
        panel = Panel(setting["name"], metric[1])
        for row in setting["rows"]:
            for name, place in places(setting).items():
                if found := values_of_row(row, metric_of_test(name, metric[0])):
                    panel.add(row["name"], place, statistics.fmean(found))
                    if place == trained(setting, row):
                        panel.circled.append((place, statistics.fmean(found)))
        panels.append(panel)
    return [panel for panel in panels if panel.curves]


def _accuracies(
    plan: Plan, report: Report, place: Callable[[Setting, SystemRow], float | None], last: bool = False
) -> list[Panel]:
    """Accuracy by a number of each row: a panel for each task, of all lengths or of the last one."""
    panels: dict[str, Panel] = {}
    for setting, found in sorted(zip(plan.settings, report["settings"], strict=True), key=lambda pair: pair[0].context):
        name = f"{setting.task}" + (f", {setting.pairs:,} to remember" if setting.pairs else "")
        panel = Panel(found["name"], "accuracy") if last else panels.get(name, Panel(name, "accuracy"))
        for row in found["rows"]:
            accuracies, x = values_of_row(row, metric_of_test("", "accuracy")), place(setting, row)
            if accuracies and x is not None:
                panel.add(row["name"], x, statistics.fmean(accuracies))
        if panel.curves:
            panels[name] = panel
    return [*panels.values()]


def _latency(report: Report) -> list[Panel]:
    """Microseconds a token by context, here and in the paper."""
    ours, paper = Panel("here", "µs per token"), Panel("the paper", "ms per step of 262,144 tokens")
    for setting in report["settings"]:
        for row in setting["rows"]:
            ours.add(row["name"], setting["context"], row["microseconds_per_token"])
            paper.add(row["name"], setting["context"], row["paper"].get("latency_ms"))
    return [panel for panel in (ours, paper) if panel.curves] if ours.curves else []


def _curves(plan: Plan, report: Report) -> Any:
    """Held-out loss by seconds of training, with a panel for each setting; None without any."""
    metric, unit = metric_of_report(plan)
    place = 3 if metric == "bits_per_byte" else 2
    settings = [each for each in report["settings"] if any(run["curve"] for row in each["rows"] for run in row["runs"])]
    if not settings:
        return None
    looks = _looks(plan, (row["name"] for setting in settings for row in setting["rows"]))
    figure, panels = new_panels(len(settings), len(looks))
    lines: dict[str, Any] = {}
    for axes, setting in zip(panels, settings, strict=True):
        late: list[float] = []
        base = baseline_row(setting["rows"], plan.experiment.baseline)
        for row, run in ((each, run) for each in setting["rows"] for run in each["runs"] if run["curve"]):
            seconds, values = [point[1] for point in run["curve"]], [point[place] for point in run["curve"]]
            look, first = looks[row["name"]], run["seed"] == 0
            (line,) = axes.plot(seconds, values, markersize=3 if first else 0, linewidth=1.4 if first else 0.7, **look)
            lines.setdefault(row["name"], line)
            late += values[len(values) // 3 :]
            if row is base and first:
                axes.axhline(values[-1], color=look["color"], linestyle=":", linewidth=1)
        low, high = min(late), max(late)  # the first losses would flatten what is compared
        margin = 0.05 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)
        axes.set(title=setting["name"], xlabel="seconds of training", ylabel=unit)
        label_axes(axes)
    legend_below(figure, lines, 3 * min(len(settings), 2))
    return figure


def _looks(plan: Plan, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a marker for each name: those of its arm, which are the same in all reports of an experiment."""
    shown = list(dict.fromkeys(names))
    everything = dict.fromkeys([*(arm.name for arm in plan.experiment.arms), *shown])
    looks = dict(zip(everything, cycle(zip(_COLOURS, _MARKERS, strict=True)), strict=False))
    return {name: {"color": looks[name][0], "marker": looks[name][1]} for name in shown}
