"""The stack that all models share: embedding, positions, blocks, norm.

Shapes: B batch, T tokens, N new tokens of a stream, d model width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers.dense import Embedding
from lineartime.layers.mixer import Mixer
from lineartime.layers.positions import LearnedPositions, ScaledSin
from lineartime.layers.residual import build_norm, check_device
from lineartime.models.config import LayerConfig, ModelConfig
from lineartime.ops.batch import Batch
from lineartime.ops.checks import as_mask, check_whole, is_readable
from lineartime.ops.context import ContextGroup, check_equal_slices
from lineartime.ops.make_batch import stream_batch
from lineartime.ops.state import State


class Block(nn.Module):
    """A mixer and an optional feed-forward layer. Each contains its own norm and residual connection."""

    def __init__(self, config: ModelConfig, mixer: LayerConfig, place: int = 0) -> None:
        super().__init__()
        options: dict[str, Any] = {name: getattr(config, name) for name in ("norm", "norm_eps", "norm_position", "dropout")}
        self.mixer: Mixer = mixer.build(config.d_model, causal=config.task != "mlm", **options)
        self.mixer.init_at_depth(place, config.n_blocks)
        self.feed_forward: nn.Module = nn.Identity()
        if config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build(config.d_model, **options)

    def forward(self, x: Tensor, batch: Batch, recompute: bool = False) -> Tensor:
        """Map the tokens of a batch, [B, T, d] or a pack, to the same shape.

        With `recompute`, only x is kept, and the backward pass recomputes the block.
        """
        out: Tensor
        if recompute and torch.is_grad_enabled():
            out = checkpoint(self.forward, x, batch, use_reentrant=False)
        else:
            out = self.feed_forward(self.mixer(x, batch=batch))
        return out

    def extend(self, x: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Continue streams by N tokens: [B, N, d] -> [B, N, d], and the mixer's state after them."""
        x, state = self.mixer.extend(x, state, batch=batch)
        return self.feed_forward(x), state


@dataclass(eq=False)
class ModelState(State):
    """What a model remembers of streams: the state of each block."""

    blocks: tuple[Any, ...]

    @property
    def position(self) -> Tensor:
        """int64 [B], the number of tokens that each stream has read."""
        position: Tensor = self.blocks[0].position
        return position


class Backbone(nn.Module):
    """Maps token ids to hidden vectors."""

    recompute = False
    """Whether, in training, the backward pass recomputes each block: see `LanguageModel.recompute_blocks`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.position: ScaledSin | LearnedPositions | None = None
        if config.absolute_position == "scaled_sin":
            self.position = ScaledSin(config.d_model)
        elif config.max_positions is not None:
            self.position = LearnedPositions(config.max_positions, config.d_model)
        self.token_types: nn.Embedding | None = None
        if config.token_types:
            self.token_types = Embedding(config.token_types, config.d_model)
        self.embedding_norm: nn.Module = nn.Identity()
        if config.embedding_norm:
            self.embedding_norm = build_norm(config.norm, config.d_model, config.norm_eps)
        # Annotated with the type of its elements: to type checkers, a ModuleList holds arbitrary modules.
        self.blocks: Iterable[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(config, mixer, place) for place, mixer in enumerate(islice(cycle(config.mixers), config.n_blocks))
        )
        self.norm: nn.Module = nn.Identity()
        if config.final_norm == "same":
            self.norm = build_norm(config.norm, config.d_model, config.norm_eps)
        elif config.final_norm != "none":
            self.norm = build_norm(config.final_norm, config.d_model)

    def output_weight(self, hidden: Tensor) -> Tensor:
        """The token embedding as the weight of tied logits, [V, d]; LineartimeError unless it is on the device of `hidden`."""
        weight = self.embedding.weight
        if weight.device != hidden.device:  # with weights on meta, as accelerate leaves them, PyTorch would say nothing
            raise LineartimeError(
                f"The token embedding is on {weight.device}, but it also computes logits, from vectors on {hidden.device}: do "
                "not offload it, or build the model with tie_word_embeddings=False."
            )
        return weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> [B, T, d]. Floats [B, T, d] are tokens that are embedded already."""
        if isinstance(tokens, Tensor) and tokens.dim() == 3 and tokens.is_floating_point():
            return tokens
        self.check_ids(tokens)
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def read(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        context: ContextGroup | None = None,
        token_types: Tensor | None = None,
        inputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Read whole sequences at once: ids [B, T], or embedded tokens [B, T, d] -> hidden vectors [B, T, d].

        The input of each block is appended to `inputs`. The other arguments are those of `LanguageModel`.
        """
        embedded = self.embed(tokens)
        options: dict[str, Any] = {"device": embedded.device, "context": context, "whole_chunks": self._is_compiled()}
        batches = self._batches(lambda mixer: mixer.describe(embedded.shape, mask, cu_seqlens, prefix_lengths, **options))
        if context is not None:
            check_equal_slices(embedded.shape[:2], context, embedded.device)
        first = batches[0]
        if token_types is not None:
            self._check_types(token_types, embedded)
            token_types = first.pack(token_types)
        x = self.first_input(first.pack(embedded), first.positions, token_types)
        for block, batch in zip(self.blocks, batches, strict=True):
            if inputs is not None:
                inputs.append(first.unpack(x))
            x = block(x, batch, self.recompute and self.training)
        return first.unpack(self.norm(x))

    forward = read  # hooks run where the module itself is called

    def _is_compiled(self) -> bool:
        """Whether torch.nn.Module.compile has been called on a block, which PyTorch shows in this attribute alone."""
        return any(block._compiled_call_impl is not None for block in self.blocks)

    def _batches(self, describe: Callable[[Mixer], Batch]) -> list[Batch]:
        """The batch as each block needs it. Mixers with equal needs share it: all of them, except in a hybrid.

        Needs change neither the positions of tokens nor how they are packed, so that tokens pass from one block to the next.
        """
        made: dict[tuple[Any, ...], Batch] = {}
        batches = []
        for block in self.blocks:
            key = (block.mixer.needs(), block.mixer.splits_context, block.mixer.reads_prefix)
            if key not in made:
                made[key] = describe(block.mixer)
            batches.append(made[key])
        return batches

    @property
    def constant_state(self) -> bool:
        """Whether one token of each stream updates the state of all blocks in place, in constant memory."""
        return all(block.mixer.constant_state for block in self.blocks)

    def init_state(self, batch_size: int) -> ModelState:
        """The state before the first token of `batch_size` streams. Raises ArgumentError unless the model is causal."""
        return ModelState(tuple(block.mixer.init_state(batch_size) for block in self.blocks))

    def extend(
        self, tokens: Tensor, state: ModelState | None = None, mask: Tensor | None = None, *, inputs: list[Tensor] | None = None
    ) -> tuple[Tensor, ModelState]:
        """Continue streams, or begin them without a state: tokens as of `read` -> [B, N, d], and the state after them."""
        embedded = self.embed(tokens)
        mask = as_mask("mask", mask, embedded.shape[0], embedded.shape[1], embedded.device)
        if state is None:
            state = self.init_state(embedded.shape[0])
        else:
            self.check_state(state, embedded)
        batches = self._stream_batches(embedded, state.position, mask)
        first = batches[0]
        x = self.first_input(first.pack(embedded), first.positions)
        states = []
        for block, of_block, batch in zip(self.blocks, state.blocks, batches, strict=True):
            if inputs is not None:
                inputs.append(first.unpack(x))
            x, of_block = block.extend(x, of_block, batch)
            states.append(of_block)
        return first.unpack(self.norm(x)), ModelState(tuple(states))

    def _stream_batches(self, embedded: Tensor, position: Tensor, mask: Tensor | None) -> list[Batch]:
        return self._batches(lambda mixer: stream_batch(position, embedded.shape, mask, needs=mixer.needs()))

    def read_prefix(
        self, tokens: Tensor, mask: Tensor | None = None, *, inputs: list[Tensor] | None = None
    ) -> tuple[Tensor, ModelState]:
        """Start streams with a prefix that is read bidirectionally: tokens as of `read` -> [B, N, d], and the state."""
        embedded = self.embed(tokens)
        (rows, length), device = embedded.shape[:2], embedded.device
        mask = as_mask("mask", mask, rows, length, device)
        whole = torch.full((rows,), length, device=device) if mask is None else mask.sum(1)
        batches = self._batches(lambda mixer: mixer.describe(embedded.shape, mask, None, whole, device=device))
        state = self.init_state(rows)
        streams = self._stream_batches(embedded, state.position, mask)
        first = batches[0]
        x = first.unpack(self.first_input(first.pack(embedded), first.positions))
        states = []
        for block, of_block, batch, stream in zip(self.blocks, state.blocks, batches, streams, strict=True):
            if inputs is not None:
                inputs.append(x)
            states.append(block.mixer.extend(stream.pack(x), of_block, batch=stream)[1])
            x = first.unpack(block(first.pack(x), batch))
        return self.norm(x), ModelState(tuple(states))

    def first_input(self, embedded: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """The input of the first block, [B, T, d]. Positions: [T] or [B, T]. Token types: int [B, T]; None for all 0."""
        x = embedded if self.position is None else embedded + self.position(positions)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        normed: Tensor = self.embedding_norm(x)
        return normed

    def _check_types(self, token_types: Tensor, embedded: Tensor) -> None:
        """Raise ArgumentError unless the model has token types and `token_types` [B, T] fits tokens [B, T, d]."""
        if self.token_types is None:
            raise ArgumentError("token_types", "is given, but this model has none: leave it out.")
        check_whole("token_types", token_types)
        if token_types.shape != embedded.shape[:2]:
            wanted = list(embedded.shape[:2])
            raise ArgumentError("token_types", f"has shape {list(token_types.shape)}, but must be [B, T] = {wanted}.")
        self._check_range("token_types", token_types, self.token_types, "token_types")

    def check_state(self, state: object, embedded: Tensor) -> None:
        """Raise ArgumentError unless `state` is of this model, and of as many streams as the tokens [B, N, d]."""
        if not isinstance(state, ModelState):
            found = type(state).__name__
            raise ArgumentError("state", f"is of type {found}, but must be a state, as init_state and extend return it.")
        given, own = len(state.blocks), len(list(self.blocks))
        if given != own:
            raise ArgumentError("state", f"belongs to a model with {given} blocks, but this model has {own}.")
        for block, of_block in zip(self.blocks, state.blocks, strict=True):
            block.mixer.check_state(of_block, embedded)

    def check_ids(self, ids: Tensor, argument: str = "ids") -> None:
        """Raise ArgumentError unless `ids` are token ids [B, T] within the vocabulary and on the model's device."""
        check_whole(argument, ids)
        if ids.dim() != 2:
            raise ArgumentError(argument, f"has shape {list(ids.shape)}, but must be [B, T].")
        self._check_range(argument, ids, self.embedding, "vocab_size")

    def _check_range(self, argument: str, ids: Tensor, embedding: nn.Embedding, size: str) -> None:
        """Raise ArgumentError for ids out of range or on another device. `size` names the option that sets the range."""
        check_device(argument, ids, embedding)
        if is_readable(ids):
            low, high = (int(value) for value in ids.aminmax())
            rows = embedding.weight.shape[0]  # the wrapper of PEFT has no num_embeddings
            if low < 0 or high >= rows:
                wrong = low if low < 0 else high
                raise ArgumentError(argument, f"holds {wrong}, but must be from 0 to {size} - 1 = {rows - 1}.")
