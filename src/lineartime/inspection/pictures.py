"""The pictures of an inspection: the loss of each token, and what each layer does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from lineartime.inspection.look import Inspection, LayerView
from lineartime.plots import drawable, label_axes, new_figure


def draw(inspection: Inspection) -> Iterator[tuple[str, Any]]:
    """Draw the losses and each layer that has something to show; yield the names of the files and the figures.

    Raises LineartimeError without matplotlib.
    """
    yield "losses.png", _losses(inspection)
    for number, layer in enumerate(inspection.layers, 1):
        if layer.weights or layer.states:
            yield picture_of_layer(number), _layer(layer, f"layer {number}: {layer.name}")


def picture_of_layer(number: int) -> str:
    """The name of the picture of a layer, from 1."""
    return f"layer-{number:02}.png"


def _losses(inspection: Inspection) -> Any:
    figure = new_figure(9, 3)
    axes = figure.subplots()
    losses = [loss for piece in inspection.pieces for loss in piece.losses]
    known = {place: loss for place, loss in enumerate(losses) if loss is not None}
    axes.vlines(list(known), 0, list(known.values()), color="tab:orange", linewidth=1)
    axes.plot(list(known), list(known.values()), ".", color="tab:orange", markersize=3)
    if inspection.loss is not None:
        axes.axhline(inspection.loss, color="black", linestyle=":", linewidth=1, label=f"mean, {inspection.loss:.3f}")
        axes.legend()
    axes.set(title="loss of each token", xlabel="token of the text", ylabel="nats", xlim=(-0.5, len(losses) - 0.5))
    label_axes(axes, whole_x=True)
    return figure


def _layer(layer: LayerView, title: str) -> Any:
    """Draw the attention maps of a layer, what its parts add to each token, and the norms of its state."""
    panels = len(layer.weights) + bool(layer.added) + bool(layer.states)
    figure = new_figure(4.4 * panels, 4.2)
    figure.get_layout_engine().set(w_pad=0.15)  # the numbers of a colour bar must not touch the next panel's label
    axes = iter(figure.subplots(1, panels, squeeze=False)[0])
    for part, weights in layer.weights.items():
        _draw_map(figure, next(axes), weights, part if part == "attention" else f"{part} part")
    if layer.added:
        _draw_added(next(axes), layer)
    if layer.states:
        last = next(axes)
        last.plot(list(layer.states), list(layer.states.values()), ".-", color="tab:green")
        last.set(title="global state", xlabel="tokens read", ylabel="norm of the state")
        label_axes(last, whole_x=True)
    figure.suptitle(drawable(title))
    return figure


def _draw_map(figure: Any, axes: Any, weights: Tensor, title: str) -> None:
    from matplotlib.colors import FuncNorm

    largest = float(weights.abs().max()) or 1.0
    signed = bool((weights < 0).any())
    roots = FuncNorm(  # so that weak weights are visible, too
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x)),
        vmin=-largest if signed else 0.0,
        vmax=largest,
    )
    image = axes.imshow(weights.numpy(), cmap="RdBu_r" if signed else "viridis", norm=roots)
    axes.set(title=f"{title}: weights", xlabel="position that is read", ylabel="position that reads")
    figure.colorbar(image, ax=axes, shrink=0.8)


def _draw_added(axes: Any, layer: LayerView) -> None:
    share = layer.global_share
    if share is None:
        for part, norms in layer.added.items():
            axes.plot(norms.numpy(), color="tab:blue", linewidth=1, label=part)
        axes.set(title="what it adds to each token", xlabel="position", ylabel="norm")
    else:
        axes.stackplot(range(len(share)), (1 - share).numpy(), share.numpy(), labels=["local", "global"], alpha=0.8)
        axes.set(title="which part adds how much", xlabel="position", ylabel="share of the norms", ylim=(0, 1))
    axes.legend()
    label_axes(axes, whole_x=True)
