"""The pictures of an inspection: attention maps as pixels for the page, and one PNG per layer for other uses."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lineartime.errors import missing_extra
from lineartime.inspection.look import Inspection, LayerView
from lineartime.runs.figures import drawable, new_figure, save_figure
from lineartime.runs.ticks import label_axes

POSITIVE, NEGATIVE = (217, 95, 2), (31, 119, 180)
"""The colours of weights above and below zero; the opacity shows the strength of a weight."""
MOST_PIXELS = 600
"""The maximum width of a map, in pixels; a page shows it at half of this."""
_PURPOSE = "A picture of a model"


def map_pixels(weights: Tensor) -> Tensor:
    """Weights [T, T] as colours with transparency, which suit light and dark pages: uint8 [P, P, 4].

    The opacity is the square root of a weight relative to the largest one, so that weak weights are visible, too. In a longer
    text than `MOST_PIXELS`, a pixel is the mean of several weights: a page of many layers would have hundreds of megabytes.
    """
    if len(weights) > MOST_PIXELS:
        weights = adaptive_avg_pool2d(weights[None], MOST_PIXELS)[0]
    colours = torch.tensor([NEGATIVE, POSITIVE], dtype=torch.uint8, device="cpu")[(weights > 0).long()]
    strength = (weights.abs() / weights.abs().max().clamp(min=torch.finfo(weights.dtype).tiny)).sqrt()
    return torch.cat([colours, (255 * strength).round().to(torch.uint8)[..., None]], -1)


def map_png(weights: Tensor) -> bytes:
    """The pixels of `map_pixels` as a PNG; raises LineartimeError without matplotlib."""
    try:
        from matplotlib.image import imsave
    except ImportError:
        raise missing_extra("matplotlib", "plot", _PURPOSE) from None
    file = io.BytesIO()
    imsave(file, map_pixels(weights).numpy(), format="png")
    return file.getvalue()


def draw_losses(inspection: Inspection, file: Path) -> None:
    """Draw the loss of each predicted token."""
    figure = new_figure(_PURPOSE, 9, 3)
    axes = figure.subplots()
    losses = [loss for piece in inspection.pieces for loss in piece.losses]
    known = [(place, loss) for place, loss in enumerate(losses) if loss is not None]
    axes.vlines([place for place, _ in known], 0, [loss for _, loss in known], color="tab:orange", linewidth=1)
    axes.plot([place for place, _ in known], [loss for _, loss in known], ".", color="tab:orange", markersize=3)
    mean = inspection.loss
    if mean is not None:
        axes.axhline(mean, color="black", linestyle=":", linewidth=1, label=f"mean, {mean:.3f}")
        axes.legend()
    axes.set(title="loss of each token", xlabel="token of the text", ylabel="nats", xlim=(-0.5, max(len(losses), 4) - 0.5))
    axes.grid(alpha=0.3)
    label_axes(axes, whole_x=True)
    save_figure(figure, file)


def draw_layer(layer: LayerView, title: str, file: Path) -> None:
    """Draw the maps of a layer, what its parts add to each token, and the norms of its state, above a note of what it lacks."""
    panels: list[Any] = [*layer.weights, *(["added"] if layer.added else []), *(["states"] if layer.states else [])]
    figure = new_figure(_PURPOSE, 4.4 * max(1, len(panels)), 4.2 + 0.25 * len(layer.missing))
    figure.get_layout_engine().set(w_pad=0.15)  # the numbers of a colour bar must not touch the next panel's label
    every = figure.subplots(1, max(1, len(panels)), squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=False):
        if panel == "added":
            _draw_added(axes, layer)
        elif panel == "states":
            axes.plot(list(layer.states), list(layer.states.values()), ".-", color="tab:green")
            axes.set(title="global state", xlabel="tokens read", ylabel="norm of the state")
            axes.grid(alpha=0.3)
            label_axes(axes, whole_x=True)
        else:
            _draw_map(axes, layer.weights[panel], "attention" if panel == "attention" else f"{panel} part", figure)
    if not panels:
        every[0].set_axis_off()
    figure.suptitle(drawable(title))
    if layer.missing:
        figure.supxlabel("\n".join(layer.missing), fontsize="small")
    save_figure(figure, file)


def _draw_map(axes: Any, weights: Tensor, title: str, figure: Any) -> None:
    largest = float(weights.abs().max()) or 1.0
    signed = bool((weights < 0).any())
    image = axes.imshow(
        weights.numpy(),
        cmap="RdBu_r" if signed else "viridis",
        norm="linear",
        vmin=-largest if signed else 0.0,
        vmax=largest,
        interpolation="nearest" if len(weights) <= MOST_PIXELS else "antialiased",
    )
    axes.set(title=f"{title}: weights", xlabel="position that is read", ylabel="position that reads")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
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
    axes.grid(alpha=0.3)
    label_axes(axes, whole_x=True)
