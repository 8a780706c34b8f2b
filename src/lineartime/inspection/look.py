"""Collect what an inspection shows: weights, contributions and states of each layer as a model reads a text, and losses.

Shapes: T tokens that the model reads, d model width.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.data.batches import evaluation_batch, row_frame
from lineartime.data.tokenizers import FRAME, Tokenizer, check_vocabulary, encode_given
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.evaluation.perplexity import token_losses
from lineartime.fields import Between, check_limits
from lineartime.layers.mixer import Mixer, Part
from lineartime.models.language_model import LanguageModel, check_finite_logits, check_model
from lineartime.ops.checks import check_positive
from lineartime.ops.cross_entropy import IGNORED

MAX_TOKENS = 2048
"""The maximum number of tokens shown: an attention map has a point for each pair of tokens."""
_STATES = 64
"""The maximum number of places along the text at which the state of a layer is measured."""


@dataclass(frozen=True)
class Piece:
    """A text of whole characters, and the loss in nats of each of its tokens; None where the model had nothing to predict."""

    text: str
    losses: tuple[float | None, ...]

    @property
    def loss(self) -> float | None:
        """The sum of the losses in nats; None if no token had to be predicted."""
        known = [loss for loss in self.losses if loss is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class LayerView:
    """What one layer does with the text.

    Attributes:
        name: the class name of the mixer.
        weights: for each part of its attention, how much each token (row) reads each other token (column), [T, T]; the mean
            over heads.
        added: for each part, the norm of what it adds to each token, [T].
        states: the norm of the global state, by the number of tokens read; empty for a mixer without one.
        missing: sentences that say what this mixer does not have.
    """

    name: str
    weights: Mapping[Part, Tensor]
    added: Mapping[Part, Tensor]
    states: Mapping[int, float]
    missing: tuple[str, ...]

    @property
    def global_share(self) -> Tensor | None:
        """The global part's share of the norms added to each token, from 0 to 1, [T]; None without both parts."""
        if not {"local", "global"} <= self.added.keys():
            return None
        local, across = self.added["local"], self.added["global"]
        return across / (local + across).clamp(min=torch.finfo(across.dtype).tiny)


@dataclass(frozen=True)
class Inspection:
    """What a model does with a text.

    Attributes:
        task: the task of the model.
        pieces: the text, with losses.
        left_out: how many tokens were not read, because the text was too long.
        prefix: how many tokens at the beginning were read in both directions, by a model of task "prefix-lm".
        layers: the layers, from first to last.
    """

    task: str
    pieces: tuple[Piece, ...]
    left_out: int
    prefix: int
    layers: tuple[LayerView, ...]

    @property
    def loss(self) -> float | None:
        """The mean loss in nats over the predicted tokens; None if there are none."""
        known = [loss for piece in self.pieces for loss in piece.losses if loss is not None]
        return sum(known) / len(known) if known else None


def check_max_tokens(max_tokens: int) -> None:
    """Raise ArgumentError unless `inspect` takes this many tokens."""
    check_positive(max_tokens=max_tokens)
    check_limits("max_tokens", max_tokens, [Between(most=MAX_TOKENS)])


@torch.no_grad()
def inspect(model: LanguageModel, tokenizer: Tokenizer, text: str, max_tokens: int = 512) -> Inspection:
    """Let a model read a text, and collect what its layers do.

    The model reads and predicts the text as in an evaluation. A causal model reads it after an end-of-document token. For a
    masked model, 15% of the tokens are masked, always the same. A model of task "prefix-lm" reads the first half as prefix.

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
    check_max_tokens(max_tokens)
    ids = encode_given(tokenizer, "text", text)
    shown, longest = ids[:max_tokens], config.longest_sequence
    if not ids:
        raise ArgumentError("text", "is empty, but must hold at least one token.")
    frame = () if row_frame(config.task, tokenizer) is None else FRAME
    if longest is not None and len(shown) + len(frame) > longest:
        found = f"has {len(shown) + len(frame):,} tokens, but this model reads at most {longest:,}: shorten it, or use "
        raise ArgumentError("text", found, f"`max_tokens={longest - len(frame)!r}`.")
    end = tokenizer.end_of_document
    window = torch.tensor([[*shown, end] if config.task == "mlm" else [end, *shown]], device="cpu")
    batch, device = evaluation_batch(config.task, window, tokenizer, [0]), next(model.parameters()).device
    prefixes = None if batch.prefix_lengths is None else batch.prefix_lengths.to(device)
    prefix = 0 if prefixes is None else max(0, int(prefixes) - 1)  # the first is the end of a document

    inputs: list[Tensor] = []
    backbone = model.backbone
    hidden = backbone.read(batch.inputs.to(device), prefix_lengths=prefixes, inputs=inputs)
    losses = token_losses(model, hidden, batch.targets.to(device))[0].tolist()
    check_finite_logits(all(map(math.isfinite, losses)))
    known = [loss if target != IGNORED else None for loss, target in zip(losses, batch.targets[0].tolist(), strict=True)]
    layers = tuple(_layer(block.mixer, x, prefixes) for block, x in zip(backbone.blocks, inputs, strict=True))
    pieces = _pieces(tokenizer, shown, known[1:-1] if frame else known)
    if frame:
        pieces = (Piece(frame[0], (None,)), *pieces, Piece(frame[1], (None,)))
    return Inspection(config.task, pieces, len(ids) - len(shown), prefix, layers)


def _pieces(tokenizer: Tokenizer, ids: list[int], losses: list[float | None]) -> tuple[Piece, ...]:
    """The pieces of the text; tokens that make a character only together, such as its bytes, are joined."""
    decoder, pieces = tokenizer.stream_decoder(), []
    waiting: list[float | None] = []

    for token, loss in zip(ids, losses, strict=True):
        waiting.append(loss)
        if text := decoder.push(token):
            pieces.append(Piece(text, tuple(waiting)))
            waiting = []
    rest = decoder.flush()
    if waiting or rest:
        pieces.append(Piece(rest, tuple(waiting)))
    return tuple(pieces)


def _layer(mixer: Mixer, x: Tensor, prefix_lengths: Tensor | None) -> LayerView:
    """What a layer does with its input, [1, T, d]."""
    name, missing = type(mixer).__name__, []
    weights: dict[Part, Tensor] = {}
    added: dict[Part, Tensor] = {}
    try:
        opened = mixer.open(x, mixer.describe(x.shape, prefix_lengths=prefix_lengths, device=x.device))
        for part in opened.parts:
            weights[part] = opened.weights(part)[0].mean(0).float().cpu()
            added[part] = opened.contribution(part)[0].float().norm(dim=-1).cpu()
    except LineartimeError as reason:
        missing.append(str(reason))
    if len(added) == 1:
        part = next(iter(added))
        all_of_it = "one attention over all that a token reads" if part == "attention" else f"a {part} part alone"
        missing.append(f"{name} has {all_of_it}: what it adds is not divided into a local and a global part.")
    states = _states(mixer, x, 0 if prefix_lengths is None else int(prefix_lengths))
    if not mixer.causal:
        missing.append(f"{name} reads in both directions here: no state grows along the text.")
    elif not states:
        missing.append(f"{name} has no global state of constant size: it keeps what it has read, or reads no further back.")
    return LayerView(name, weights, added, states, tuple(missing))


def _states(mixer: Mixer, x: Tensor, prefix: int) -> dict[int, float]:
    """The norm of the global state by the number of tokens read, measured on a stream of the same tokens."""
    if not mixer.causal:
        return {}
    length, position = x.shape[1], 0
    states: dict[int, float] = {}
    state = None
    while position < length:
        stop = min(length, position + -(-length // _STATES))
        if position < prefix:
            stop = prefix
            _, state = mixer.read_prefix(x[:, :stop])
        else:
            _, state = mixer.extend(x[:, position:stop], state)
        position = stop
        summary = mixer.global_state(state)
        if summary is None:
            return {}
        states[position] = float(summary[0].float().norm())
    return states
