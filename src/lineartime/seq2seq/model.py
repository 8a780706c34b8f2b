"""Sequence to sequence: an encoder reads a source; a decoder generates a target, with gated cross-attention to the source.

Shapes: B batch, S tokens of the source, T tokens of the target, N new tokens of the target, d model width, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_limits, check_type
from lineartime.layers.cross import CrossGAU, SourceState
from lineartime.layers.dense import dense
from lineartime.layers.mixer import Mixer
from lineartime.layers.residual import Norm, build_norm
from lineartime.models.backbone import Backbone
from lineartime.models.config import LayerConfig, ModelConfig, PartsConfig
from lineartime.models.language_model import check_evaluates
from lineartime.models.systems import PRESETS, system_of
from lineartime.ops.checks import as_mask, check_positive
from lineartime.ops.packing import Packing, describe
from lineartime.ops.state import State


@dataclass(frozen=True)
class EncoderDecoderConfig(PartsConfig):
    """An encoder of identical blocks, and a decoder of identical blocks that attend to the encoder's output.

    Attributes:
        vocab_size: number of tokens. The encoder, the decoder and the output share one embedding.
        d_model: width of the residual streams.
        n_encoder_blocks: number of blocks of the encoder.
        n_decoder_blocks: number of blocks of the decoder. Small models learn to reverse a string with two, but not with one:
            where to attend depends on the length of the source, which must be read first.
        mixer: the layer that moves information between the tokens of one side; causal only in the decoder.
        cross: the layer that moves information from the source to the target.
        feed_forward: the last layer of each block; None for models of gated attention units, which need none.
        norm: the norm before every layer, before the source is read and before the logits.
        dropout: the dropout rate of every layer's output.
    """

    vocab_size: Annotated[int, Between(1, 2**31 - 1)]
    d_model: Annotated[int, Between(1, 2**24)]
    n_encoder_blocks: Annotated[int, Between(1, 10**6)]
    n_decoder_blocks: Annotated[int, Between(1, 10**6)]
    mixer: LayerConfig
    cross: LayerConfig = field(default_factory=partial(LayerConfig, "cross-gau"))
    feed_forward: LayerConfig | None = None
    norm: Norm = "layernorm"
    dropout: Annotated[float, Between(0, below=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, layer = self.mixer.kind, self.mixer.layer
        for side, why in (("decoder must be", layer.why_not_causal), ("encoder is not", layer.why_only_causal)):
            if why is not None:
                raise ArgumentError("mixer", f"is {kind}, but the {side} causal: {why}; use another kind.")

    def build(self) -> "EncoderDecoder":
        """Build the model, freshly initialised."""
        return EncoderDecoder(self)

    def encoder(self) -> ModelConfig:
        """The config of the encoder, which is the backbone of a masked language model."""
        names = ("vocab_size", "d_model", "mixer", "feed_forward", "norm", "dropout")
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        return ModelConfig(task="mlm", n_blocks=self.n_encoder_blocks, **shared)


class DecoderBlock(nn.Module):
    """A causal mixer, cross-attention and an optional feed-forward layer, each with its own norm and residual."""

    def __init__(self, config: EncoderDecoderConfig, place: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"norm": config.norm, "dropout": config.dropout}
        self.mixer: Mixer = config.mixer.build(config.d_model, causal=True, **options)
        self.mixer.init_at_depth(place, config.n_decoder_blocks)
        self.cross: CrossGAU = config.cross.build(config.d_model, **options)
        self.feed_forward: nn.Module = nn.Identity()
        if config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build(config.d_model, **options)

    def forward(self, x: Tensor, packing: Packing, source: SourceState, mask: Tensor | None) -> Tensor:
        """Map target vectors [B, T, d] to [B, T, d]; `mask`, bool [B, T], is True for real tokens, which the mixer reads."""
        mixed = packing.unpack(self.mixer(packing.pack(x), packing=packing))
        out: Tensor = self.feed_forward(self.cross.attend(mixed, source, mask))
        return out

    def extend(self, x: Tensor, state: Any, packing: Packing, source: SourceState) -> tuple[Tensor, Any]:
        """Continue targets by N tokens: [B, N, d] -> [B, N, d], and the mixer's state after them."""
        y, state = self.mixer.extend(packing.pack(x), state, packing=packing)
        x = packing.unpack(y)
        return self.feed_forward(self.cross.attend(x, source)), state


@dataclass(eq=False)
class EncoderDecoderState(State):
    """For each block of the decoder, the state of its mixer, and its keys and values of the source, which never change."""

    mixers: tuple[Any, ...]
    sources: tuple[SourceState, ...]

    @property
    def position(self) -> Tensor:
        """int64 [B], the number of target tokens read so far."""
        position: Tensor = self.mixers[0].position
        return position


class EncoderDecoder(nn.Module):
    """Maps source ids [B, S] and target ids [B, T] to logits [B, T, V], which predict the next target token."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Backbone(config.encoder())
        # Annotated with the type of its elements: to type checkers, a ModuleList holds arbitrary modules.
        self.blocks: Iterable[DecoderBlock] = nn.ModuleList(  # type: ignore[assignment]
            DecoderBlock(config, place) for place in range(config.n_decoder_blocks)
        )
        self.norm = build_norm(config.norm, config.d_model)

    def forward(
        self, source_ids: Tensor, target_ids: Tensor, source_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of every target token.

        Args:
            source_ids: [B, S] token ids.
            target_ids: [B, T] token ids, usually the target after a start token.
            source_mask, target_mask: of the same shapes, bool or integers 0 and 1, True for real tokens. Padding may be
                anywhere.

        Raises:
            ArgumentError: if shapes do not match.
        """
        sources = self._encode(source_ids, source_mask)
        self.encoder.check_ids(target_ids, "target_ids")
        if target_ids.shape[:1] != source_ids.shape[:1]:
            shape = list(target_ids.shape)
            raise ArgumentError("target_ids", f"has shape {shape}, but must have {source_ids.shape[0]} rows, like source_ids.")
        target_mask = as_mask("target_mask", target_mask, target_ids.shape[0], target_ids.shape[1], target_ids.device)
        packing = self.decoder_mixer.describe(target_ids.shape, target_mask, device=target_ids.device)
        x = self._embed(target_ids, packing)
        for block, source in zip(self.blocks, sources, strict=True):
            x = block(x, packing, source, target_mask)
        return self._logits(x)

    def init_state(self, source_ids: Tensor, source_mask: Tensor | None = None) -> EncoderDecoderState:
        """Read the sources [B, S] once, and return the state before the first token of B targets."""
        sources = self._encode(source_ids, source_mask)
        return EncoderDecoderState(tuple(block.mixer.init_state(source_ids.shape[0]) for block in self.blocks), sources)

    def extend(self, target_ids: Tensor, state: EncoderDecoderState) -> tuple[Tensor, EncoderDecoderState]:
        """Continue targets by N tokens: ids [B, N] -> logits [B, N, V], and the state after them. `state` is consumed."""
        self.encoder.check_ids(target_ids, "target_ids")
        if not isinstance(state, EncoderDecoderState) or len(state.mixers) != self.config.n_decoder_blocks:
            what = "is of another model: give the state that init_state or extend of this model returned."
            raise ArgumentError("state", what)
        self.decoder_mixer.check_state(state.mixers[0], target_ids)
        packing = describe(target_ids.shape, device=target_ids.device, position=state.position)
        x = self._embed(target_ids, packing)
        mixers = []
        for block, mixer, source in zip(self.blocks, state.mixers, state.sources, strict=True):
            x, mixer = block.extend(x, mixer, packing, source)
            mixers.append(mixer)
        return self._logits(x), replace(state, mixers=tuple(mixers))

    def _encode(self, source_ids: Tensor, source_mask: Tensor | None) -> tuple[SourceState, ...]:
        self.encoder.check_ids(source_ids, "source_ids")
        source_mask = as_mask("source_mask", source_mask, source_ids.shape[0], source_ids.shape[1], source_ids.device)
        hidden = self.encoder(self.encoder.embedding(source_ids), source_mask)
        return tuple(block.cross.project_source(hidden, source_mask) for block in self.blocks)

    @property
    def decoder_mixer(self) -> Mixer:
        """The mixer of the decoder's first block; all blocks have the same kind of mixer."""
        return next(iter(self.blocks)).mixer

    def _embed(self, target_ids: Tensor, packing: Packing) -> Tensor:
        return packing.unpack(self.encoder.first_input(self.encoder.embedding(packing.pack(target_ids)), packing))

    def _logits(self, x: Tensor) -> Tensor:
        return dense(self.norm(x), self.encoder.output_weight(x))


def encoder_decoder_config(preset: str, **overrides: Any) -> EncoderDecoderConfig:
    """The config of an encoder-decoder with the layers and the size of a preset, half of whose blocks are on each side.

    Gated units read the source with one gated head. Transformers read it with as many heads as they have, softmax, and no gate.

    Args:
        preset: the name of a preset, such as "flash-tiny".
        **overrides: other values for fields, or for options of layers, as `EncoderDecoderConfig.override` takes them.

    Raises:
        ArgumentError: for an unknown preset, or one that makes no encoder-decoder; or as `override`.
    """
    system = system_of(preset)
    if system.fields:
        fields = ", ".join(system.fields)
        raise ArgumentError("preset", f"is {preset!r}, which sets {fields}, but encoder-decoders do not: use another preset.")
    # With scores that start near 1, small models learn to reverse strings or to map two words only much later, if at all.
    size = replace(PRESETS[preset][1], initial_scores="small")
    model = system.model(size, "clm" if system.why_not_learned("clm") is None else "mlm")
    cross, half = LayerConfig("cross-gau", d_qk=size.d_qk), model.n_blocks // 2
    if model.feed_forward is not None:
        heads = model.mixer.options.get("n_heads", size.n_heads)
        cross = cross.override(n_heads=heads, d_qk=size.d_model, expansion=1, activation="softmax", gated=False)
    config = EncoderDecoderConfig(size.vocab_size, size.d_model, half, half, model.mixer, cross, model.feed_forward)
    return config.override(**overrides)


@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    source_ids: Tensor,
    source_mask: Tensor | None = None,
    *,
    start_token: int,
    stop_token: int | None,
    max_tokens: int,
    beams: int = 1,
    length_penalty: float = 1.0,
) -> list[list[int]]:
    """Decode the target of every source by beam search; with one beam, always by the most likely token.

    Each step keeps the most likely continuations. One that ends leaves the beam. Of those that have ended, or have `max_tokens`
    tokens, the result is the one with the highest log-likelihood, divided by its number of tokens to a power.

    Args:
        model: an encoder-decoder in evaluation mode.
        source_ids, source_mask: as for the model.
        start_token: the token before every target.
        stop_token: the token that ends a target, and is not returned; None for targets of `max_tokens` tokens.
        max_tokens: the maximum number of tokens to generate, including the stop token.
        beams: K, the number of continuations to keep.
        length_penalty: the power of the length; 0 for plain likelihoods, which favour short targets.

    Returns:
        The token ids of B targets.

    Raises:
        ArgumentError: for another kind of model, if shapes do not match, a token is outside the vocabulary, `max_tokens` is
            more than the decoder can read, another value is out of range, or the model is in training mode with dropout.
    """
    if not isinstance(model, EncoderDecoder):
        what = f"is of type {type(model).__name__}, but must be an EncoderDecoder: for a language model, use generate."
        raise ArgumentError("model", what)
    check_positive(max_tokens=max_tokens, beams=beams)
    check_limits("length_penalty", length_penalty, [Between(0)])
    for name, given in {"start_token": start_token, "stop_token": stop_token}.items():
        check_type(name, given, int if name == "start_token" else int | None)
        check_limits(name, given, [Between(0, model.config.vocab_size - 1)])
    check_evaluates(model, model.config.dropout)
    longest = model.decoder_mixer.longest_sequence
    if longest is not None and max_tokens > longest:
        raise ArgumentError("max_tokens", f"is {max_tokens}, but the decoder of this model reads at most {longest} tokens.")
    rows, vocab_size = source_ids.shape[0], model.config.vocab_size
    first = beams * torch.arange(rows, device=source_ids.device)[:, None]  # the first stream of each row, of B * K
    state = model.init_state(source_ids, source_mask)
    state = state.take((first // beams).expand(-1, beams).flatten())
    tokens = source_ids.new_full((rows * beams, 1), start_token)
    written = source_ids.new_empty(rows, beams, 0)
    scores = torch.full((rows, beams), -math.inf, dtype=torch.float64, device=source_ids.device)
    scores[:, 0] = 0.0  # the others are copies of it; -inf marks a beam without a continuation
    best, found = scores.new_full((rows,), -math.inf), written.new_empty(rows, 0).tolist()
    for length in range(1, max_tokens + 1):
        logits, state = model.extend(tokens, state)
        likelihoods = logits.to(scores.dtype).log_softmax(-1).view(rows, beams, vocab_size)
        scores, chosen = (scores[..., None] + likelihoods).flatten(1).topk(beams)
        beam, token = chosen // vocab_size, chosen % vocab_size
        before = written.gather(1, beam[..., None].expand(-1, -1, length - 1))
        written = torch.cat([before, token[..., None]], -1)
        ended = token == stop_token if stop_token is not None else torch.zeros_like(token, dtype=torch.bool)
        ended |= length == max_tokens
        values, places = (scores.masked_fill(~ended, -math.inf) / length**length_penalty).max(1)
        for row in (values > best).nonzero().flatten().tolist():
            found[row] = written[row, places[row]].tolist()
        best, scores = torch.maximum(best, values), scores.masked_fill(ended, -math.inf)
        if (best >= scores.amax(1) / max_tokens**length_penalty).all():  # likelihoods fall: no continuation can be better
            break
        if beams > 1:
            streams = (first + beam).flatten()  # of the same source
            state = replace(state, mixers=tuple(mixer.take(streams) for mixer in state.mixers))
        tokens = token.view(-1, 1)
    return [tokens[: tokens.index(stop_token)] if stop_token in tokens else tokens for tokens in found]
