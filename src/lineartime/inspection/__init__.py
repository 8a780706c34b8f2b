"""What a model does with a text: the losses of its tokens, and the attention weights and states of each layer, as one picture.

Shapes: T tokens that the model reads, d model width, H heads, which are one in GAU and FLASH.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from lineartime.data.batches import evaluation_batch, row_frame
from lineartime.data.tokenizers import FRAME, Tokenizer, check_vocabulary, encode_given
from lineartime.errors import ArgumentError
from lineartime.evaluation import token_losses
from lineartime.fields import Between, check_type
from lineartime.layers.attention import Attention
from lineartime.layers.flash import FLASH, GAU
from lineartime.layers.mesa import FLASHMesa
from lineartime.layers.mixer import Mixer, ShiftedState
from lineartime.models.language_model import LanguageModel, check_finite_logits, check_model
from lineartime.ops.cross_entropy import IGNORED
from lineartime.ops.mixed_chunk import attend
from lineartime.ops.modes import acc_dtype
from lineartime.plots import drawable, label_axes, new_figure, whole_numbers

__all__ = ["Inspection", "LayerView", "draw", "inspect", "open_attention"]

MAX_TOKENS = 2048
"""The maximum number of tokens shown: an attention map has a point for each pair of tokens."""
_STATES = 64
"""The maximum number of places along the text at which the state of a layer is measured."""
_LABELLED = 72
"""The maximum number of tokens that are written below the losses."""


@dataclass(frozen=True)
class LayerView:
    """What one layer does with the text."""

    name: str  # the class name of the mixer
    weights: Mapping[str, Tensor]  # as `open_attention` returns them, float32
    state_norms: Mapping[int, float]  # of the sum over earlier chunks or tokens, by the tokens read; empty without one
    state_bytes: Mapping[int, int]  # of the whole state, by the tokens read; empty for a bidirectional mixer


@dataclass(frozen=True)
class Inspection:
    """What a model does with a text."""

    tokens: tuple[str, ...]  # the text of each token that may be predicted
    losses: Tensor  # of each of them in nats, float32 [T]; NaN where the model had nothing to predict
    layers: tuple[LayerView, ...]  # from first to last
    notes: tuple[str, ...]  # sentences about the text, such as one about tokens that were left out

    @property
    def loss(self) -> float | None:
        """The mean loss in nats over the predicted tokens; None if there are none."""
        mean = float(self.losses.nanmean())
        return None if math.isnan(mean) else mean

    def _repr_png_(self) -> bytes:
        """The picture, which a notebook shows."""
        content = io.BytesIO()
        draw(self).savefig(content, format="png")
        return content.getvalue()


@torch.no_grad()
def inspect(model: LanguageModel, tokenizer: Tokenizer, text: str, max_tokens: int = 512) -> Inspection:
    """Let a model read a text, and collect what its layers do.

    The model reads and predicts the text as in an evaluation. A causal model reads it after an end-of-document token, so that
    position t holds token t - 1 and predicts token t. For a masked model, 15% of the tokens are masked, always the same. A
    model of task "prefix-lm" reads the first half as prefix.

    Args:
        model: a model in evaluation mode.
        tokenizer: the tokenizer of the model.
        text: a text of at least one token.
        max_tokens: how many tokens to read from the beginning of the text, at most 2,048.

    Raises:
        ArgumentError: for a text without a token or longer than the model can read, or a tokenizer that does not fit the model.
        LineartimeError: if the logits are not finite.
    """
    config = check_model(model, LanguageModel, "be inspected").config
    check_vocabulary(tokenizer, config.vocab_size)
    check_type("max_tokens", max_tokens, Annotated[int, Between(1, MAX_TOKENS)])
    ids = encode_given(tokenizer, "text", text)
    shown, longest = ids[:max_tokens], config.longest_sequence
    if not ids:
        raise ArgumentError("text", "is empty, but must hold at least one token.")
    frame = () if row_frame(config.task, tokenizer) is None else FRAME
    if longest is not None and len(shown) + len(frame) > longest:
        found = f"has {len(shown) + len(frame):,} tokens, but this model reads at most {longest:,}: shorten it"
        raise ArgumentError("text", f"{found}, or use `max_tokens={longest - len(frame)}`.")
    end = tokenizer.end_of_document
    window = torch.tensor([[*shown, end] if config.task == "mlm" else [end, *shown]], device="cpu")
    batch, device = evaluation_batch(config.task, window, tokenizer, [0]), next(model.parameters()).device
    prefixes = None if batch.prefix_lengths is None else batch.prefix_lengths.to(device)

    inputs: list[Tensor] = []
    backbone = model.backbone
    hidden = backbone.read(batch.inputs.to(device), prefix_lengths=prefixes, inputs=inputs)
    losses = token_losses(model, hidden, batch.targets.to(device))[0].cpu()
    check_finite_logits(bool(losses.isfinite().all()))
    layers = tuple(_layer(block.mixer, x, prefixes) for block, x in zip(backbone.blocks, inputs, strict=True))
    tokens = [tokenizer.decode([token]) for token in shown]
    notes = []
    if len(ids) > len(shown):
        notes.append(f"{len(ids) - len(shown):,} more tokens were left out.")
    if config.task == "mlm":
        notes.append("15% of the tokens are predicted, most of them masked.")
    if prefixes is not None and int(prefixes) > 1:  # the first is the end of a document
        notes.append(f"The first {int(prefixes) - 1:,} tokens are the prefix, which is read in both directions.")
    chunks = [block.mixer.chunk_size for block in backbone.blocks if isinstance(block.mixer, FLASH)]
    if any("global" in layer.weights and not layer.weights["global"].any() for layer in layers):
        chunk = f"a chunk of {max(chunks):,} tokens"
        notes.append(f"The text is no longer than {chunk}, so the global part of FLASH is empty: inspect a longer text.")
    return Inspection(
        tuple([frame[0], *tokens, frame[1]] if frame else tokens),
        losses.masked_fill(batch.targets[0] == IGNORED, math.nan),
        layers,
        tuple(notes),
    )


def _layer(mixer: Mixer, x: Tensor, prefix_lengths: Tensor | None) -> LayerView:
    """What a layer does with its input, [1, T, d]; its state is that of a stream of the same tokens."""
    weights = {part: of_part.float().cpu() for part, of_part in open_attention(mixer, x, prefix_lengths).items()}
    norms: dict[int, float] = {}
    sizes: dict[int, int] = {}
    state, position, length = None, 0, x.shape[1]
    prefix = 0 if prefix_lengths is None else int(prefix_lengths)
    while mixer.causal and position < length:
        stop = prefix if position < prefix else min(length, position + -(-length // _STATES))
        if position < prefix:
            _, state = mixer.read_prefix(x[:, :stop])
        else:
            _, state = mixer.extend(x[:, position:stop], state)
        position, sizes[stop] = stop, state.nbytes
        summary = getattr(state.own if isinstance(state, ShiftedState) else state, "summary", None)
        if summary is not None and summary.numel():
            norms[stop] = float(summary.float().norm())
    return LayerView(type(mixer).__name__, weights, norms, sizes)


def open_attention(mixer: Mixer, x: Tensor, prefix_lengths: Tensor | None = None) -> dict[str, Tensor]:
    """How much each token (row) reads each other one (column), [H, T, T], by the part of the attention.

    GAU and softmax attention have the part "attention"; FLASH has "local" and "global". Other mixers have none, and the result
    is empty. The sum of the parts times the values is what the layer gates or projects.

    Args:
        mixer: the layer.
        x: its input, one text, [1, T, d].
        prefix_lengths: int64 [1], how many of the first tokens read each other in both directions, or None.
    """
    packing = mixer.describe(x.shape, prefix_lengths=prefix_lengths, device=x.device)
    normed, _ = mixer.shifted(mixer.before(packing.pack(x)), packing, None)
    marks = torch.eye(x.shape[1], dtype=acc_dtype(x), device=x.device)  # values of which an attention returns its weights
    if type(mixer) is Attention:
        q, k, _ = mixer.project(normed, packing)
        read, _ = mixer.attend_heads((q, k, marks[:, None].expand(-1, mixer.n_heads, -1)), packing, None)
        return {"attention": read.unflatten(1, (mixer.n_heads, -1)).transpose(0, 1)}
    if not isinstance(mixer, GAU) or type(mixer) not in (GAU, FLASH, FLASHMesa):
        return {}
    options, y = mixer.options(packing), mixer.to_gate_value_base(normed)[:, -mixer.d_qk :]
    (q, k, *linear), _ = mixer.queries_and_keys(y, packing, None)
    near, _ = attend(q, k, None, None, marks, packing, options)
    if not linear:
        return {"attention": near[None]}
    q, k = linear
    if isinstance(mixer, FLASHMesa):
        q, _ = mixer.solve(q, k, packing, None)
    across, _ = attend(None, None, q, k, marks, packing, options)
    return {"local": near[None], "global": across[None]}


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
