"""The picture of an inspection: the loss of each token, and a row for each layer."""

from typing import Any

import numpy as np
from torch import Tensor

from lineartime.inspection.look import Inspection, LayerView
from lineartime.plots import drawable, label_axes, new_figure, whole_numbers

_LABELLED = 72
"""The maximum number of tokens that are written below the losses."""


def draw(inspection: Inspection, title: str = "") -> Any:
    """Draw the losses and each layer's attention weights, the mean over heads, and state, as a matplotlib figure.

    A part of the attention that no layer uses has no map. Raises LineartimeError without matplotlib.
    """
    parts = {part for layer in inspection.layers for part, weights in layer.weights.items() if weights.any()}
    maps = [{part: layer.weights[part] for part in layer.weights if part in parts} for layer in inspection.layers]
    columns, rows = max(map(len, maps)) + 1, len(maps)
    figure = new_figure(max(9.0, 4.0 * columns), 2.9 + 3.4 * rows)
    above, below = figure.subfigures(2, 1, height_ratios=[2.9, 3.4 * rows])
    _draw_losses(above.subplots(), inspection)
    figure.suptitle("\n".join(drawable(line) for line in (title, *inspection.notes) if line), fontsize="medium")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = below.subplots(rows, columns, squeeze=False)
    for number, (layer, shown, panels) in enumerate(zip(inspection.layers, maps, grid, strict=True), 1):
        name = f"layer {number}, {layer.name}"
        for axes, (part, weights) in zip(panels, shown.items(), strict=False):
            _draw_weights(below, axes, weights.mean(0), name if part == "attention" else f"{name}: {part} part")
        for unused in panels[len(shown) : -1]:
            unused.remove()
        _draw_state(panels[-1], layer, name)
    return figure


def _draw_losses(axes: Any, inspection: Inspection) -> None:
    losses = inspection.losses.numpy()
    places = np.arange(len(losses))
    axes.vlines(places, 0, losses, color="tab:blue", linewidth=1)
    axes.plot(places, losses, ".", color="tab:blue", markersize=4)
    if inspection.loss is not None:
        axes.axhline(inspection.loss, color="black", linestyle=":", linewidth=1)
        axes.set_title(f"loss of each token, with a mean of {inspection.loss:.3f} nats")
    axes.set(xlabel="token of the text", ylabel="nats", xlim=(-0.5, len(losses) - 0.5), ylim=(0, None))
    label_axes(axes, whole_x=True)
    if len(losses) <= _LABELLED:
        labels = [drawable(token.replace("\n", "↵").replace(" ", "␣")) for token in inspection.tokens]
        axes.set_xticks(places, labels)
        rotation = 90 if len(labels) * max(map(len, labels)) > 2 * _LABELLED else 0  # where they would touch
        axes.tick_params("x", labelsize="small", length=0, rotation=rotation)


def _draw_weights(figure: Any, axes: Any, weights: Tensor, title: str) -> None:
    from matplotlib.colors import FuncNorm

    axes.set(title=title, xlabel="position that is read", ylabel="position that reads")
    largest, signed = float(weights.abs().max()), bool((weights < 0).any())
    if not largest:
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.text(0.5, 0.5, "empty", ha="center", va="center", color="dimgray")
        return
    roots = FuncNorm(  # so that weak weights are visible, too
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x)),
        vmin=-largest if signed else 0.0,
        vmax=largest,
    )
    image = axes.imshow(weights.numpy(), cmap="RdBu_r" if signed else "Blues", norm=roots, interpolation="nearest")
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    ticks = [-largest, 0, largest] if signed else [0, largest / 4, largest]
    figure.colorbar(image, ax=axes, shrink=0.8, ticks=ticks, format="%.2g")


def _draw_state(axes: Any, layer: LayerView, name: str) -> None:
    """The norm of a state that sums up what was read; else its memory."""
    if not layer.state_bytes:
        axes.remove()
        return
    label, points = "norm", layer.state_norms
    if not points:
        label, points = "kB", {read: size / 1000 for read, size in layer.state_bytes.items()}
    axes.plot(list(points), list(points.values()), ".-", color="tab:green", linewidth=1)
    axes.set(title=f"{name}: state", xlabel="tokens read", ylabel=label, ylim=(0, 1.05 * max(points.values()) or 1))
    label_axes(axes, whole_x=True)
