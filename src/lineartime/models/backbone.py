"""The stack that all models share: embedding, positions, blocks, norm.

Shapes: B batch, T tokens, N new tokens of a stream, d model width.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers.checks import check_device
from lineartime.layers.dense import Embedding
from lineartime.layers.flash_stack import FlashStack, flash_stack
from lineartime.layers.mixer import Mixer
from lineartime.layers.norms import build_norm
from lineartime.layers.positions import LearnedPositions, ScaledSin
from lineartime.layers.stepping import SteppingMixer
from lineartime.layers.streams import check_state
from lineartime.models.block import Block
from lineartime.models.config import ModelConfig
from lineartime.models.streams import BackboneState, GroupedStreams, is_joined
from lineartime.ops.checks import check_whole, is_readable
from lineartime.ops.context import ContextGroup, check_equal_slices
from lineartime.ops.layout import Layout

BackboneStreams = BackboneState | GroupedStreams
"""What `join_streams` returns."""


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
        self.blocks: Iterable[Block] = nn.ModuleList(Block(config) for _ in range(config.n_blocks))  # type: ignore[assignment]
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

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        context: ContextGroup | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Read whole sequences at once: ids [B, T] -> hidden vectors [B, T, d]. Other arguments: see `LanguageModel`."""
        self.check_ids(ids)
        embedded = self.embedding(ids)
        return self.forward_embedded(embedded, mask, cu_seqlens, prefix_lengths, context=context, token_types=token_types)

    def forward_embedded(
        self,
        embedded: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        context: ContextGroup | None = None,
        inputs: list[Tensor] | None = None,
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Like `forward`, for embedded tokens: [B, T, d] -> [B, T, d]. The input of each block is appended to `inputs`."""
        options: dict[str, Any] = {"device": embedded.device, "context": context, "whole_chunks": self._is_compiled()}
        layouts = self._layouts(lambda mixer: mixer.layout(embedded.shape, mask, cu_seqlens, prefix_lengths, **options))
        if context is not None:
            check_equal_slices(embedded.shape[:2], context, embedded.device)
        x = self._first_input(embedded, layouts[0].positions, token_types)
        for block, layout in zip(self.blocks, layouts, strict=True):
            if inputs is not None:
                inputs.append(x)
            x = block(x, layout, self.recompute and self.training)
        out: Tensor = self.norm(x)
        return out

    def _is_compiled(self) -> bool:
        """Whether torch.nn.Module.compile has been called on a block, which PyTorch shows in this attribute alone."""
        return any(block._compiled_call_impl is not None for block in self.blocks)

    def _layouts(self, make: Callable[[Mixer[Any]], Layout]) -> list[Layout]:
        """The layout of each block. Mixers with equal plans share a layout: all of them, unless one was replaced."""
        made: dict[tuple[Any, ...], Layout] = {}
        layouts = []
        for block in self.blocks:
            key = (block.mixer.plan(), block.mixer.splits_context, block.mixer.reads_prefix)
            if key not in made:
                made[key] = make(block.mixer)
            layouts.append(made[key])
        return layouts

    def init_state(self, batch_size: int) -> BackboneState:
        """The state before the first token of `batch_size` streams. Raises ArgumentError unless the model is causal."""
        return BackboneState(tuple(block.mixer.init_state(batch_size) for block in self.blocks))

    def extend(self, ids: Tensor, state: BackboneState | None) -> tuple[Tensor, BackboneState]:
        """Continue streams, or begin them without a state: ids [B, N] -> hidden vectors [B, N, d], and the state after them."""
        self.check_ids(ids)
        return self.extend_embedded(self.embedding(ids), state)

    def extend_embedded(
        self, embedded: Tensor, state: BackboneState | None, *, inputs: list[Tensor] | None = None
    ) -> tuple[Tensor, BackboneState]:
        """Like `extend`, for embedded tokens. The input of each block is appended to `inputs`."""
        if state is None:
            state = self.init_state(embedded.shape[0])
        self._check_states("state", state)
        if is_joined(state):
            raise ArgumentError("state", "is of joined streams, which step continues: separate them first by separate_streams.")
        position, count = state.position, embedded.shape[1]
        return self._continue(embedded, state, lambda mixer: mixer.stream_layout(position, count, embedded.device), inputs)

    def read_prefix(self, ids: Tensor) -> tuple[Tensor, BackboneState]:
        """Start streams with a prefix that is read bidirectionally: ids [B, N] -> [B, N, d], and the state after it."""
        self.check_ids(ids)
        return self.prefix_embedded(self.embedding(ids))

    def prefix_embedded(self, embedded: Tensor, *, inputs: list[Tensor] | None = None) -> tuple[Tensor, BackboneState]:
        """Like `read_prefix`, for embedded tokens. The input of each block is appended to `inputs`."""
        state = self.init_state(embedded.shape[0])
        return self._continue(embedded, state, lambda mixer: mixer.prefix_layout(embedded.shape[:2], embedded.device), inputs)

    def _continue(
        self,
        embedded: Tensor,
        state: BackboneState,
        make: Callable[[Mixer[Any]], Layout],
        inputs: list[Tensor] | None,
    ) -> tuple[Tensor, BackboneState]:
        layouts = self._layouts(make)
        x = self._first_input(embedded, layouts[0].positions)
        states = []
        for block, block_state, layout in zip(self.blocks, state.blocks, layouts, strict=True):
            if inputs is not None:
                inputs.append(x)
            x, block_state = block.extend(x, block_state, layout)
            states.append(block_state)
        return self.norm(x), BackboneState(tuple(states))

    @property
    def steps_in_place(self) -> bool:
        """Whether all mixers can step streams at different positions together, updating fixed buffers in place."""
        return all(block.mixer.steps_in_place for block in self.blocks)

    @property
    def _steps_together(self) -> bool:
        return all(isinstance(block.mixer, SteppingMixer) for block in self.blocks)

    def join_streams(self, states: Sequence[BackboneState]) -> BackboneStreams:
        """Join streams at different positions, for `step`. Raises ArgumentError unless they are states of this model."""
        if isinstance(states, BackboneState):
            raise ArgumentError("states", "is one state, but must be a list of states: write [state].")
        states = list(states)
        if not states:
            raise ArgumentError("states", "is empty, but must hold the state of at least one stream.")
        for state in states:
            self._check_states("states", state)
        at_one_position = len({state.position for state in states}) == 1
        if not self._steps_together or (at_one_position and not self.steps_in_place):  # one group need not be copied
            self.check_states("states", states)
            return GroupedStreams(states)
        of_blocks = zip(self.blocks, zip(*(state.blocks for state in states), strict=True), strict=True)
        return BackboneState(tuple(block.stepping_mixer().join_streams(of_block) for block, of_block in of_blocks))

    def check_states(self, name: str, states: Sequence[BackboneState]) -> None:
        """Raise ArgumentError, naming the argument, unless all blocks have the layers of these states."""
        for state in states:
            self._check_states(name, state)
            for block, of_block in zip(self.blocks, state.blocks, strict=True):
                check_state(of_block, block.mixer.no_streams(), type(block.mixer).__name__, name)

    def separate_streams(self, streams: BackboneStreams) -> list[BackboneState]:
        """The state of each joined stream, for `extend`: the inverse of `join_streams`."""
        if isinstance(streams, GroupedStreams):
            states = streams.separate()
            self.check_states("streams", states)
            return states
        self._check_joined(streams)
        positions: list[int] = streams.position.tolist()
        of_blocks = (
            block.stepping_mixer().separate_streams(of_block, positions)
            for block, of_block in zip(self.blocks, streams.blocks, strict=True)
        )
        return [BackboneState(of_stream) for of_stream in zip(*of_blocks, strict=True)]

    def check_step(self, ids: Tensor, streams: BackboneStreams) -> None:
        """Raise ArgumentError unless `ids` [B, 1] holds one token per stream, and this model joined the `streams`."""
        self.check_ids(ids)
        if isinstance(streams, GroupedStreams):
            _check_one_each(ids, len(streams))
        else:
            self._check_joined(streams)
            _check_one_each(ids, streams.position.shape[0])
            first = next(iter(self.blocks)).stepping_mixer()
            first.check_streams(streams.blocks[0])  # tells models apart; step_embedded checks each

    def _check_joined(self, streams: BackboneState) -> None:
        self._check_states("streams", streams)
        if not is_joined(streams):
            raise ArgumentError("streams", "is a state of streams at one position, but must be what join_streams returned.")

    @torch.no_grad()
    def step(self, ids: Tensor, streams: BackboneStreams) -> Tensor:
        """Continue joined streams by one token: ids [B, 1] -> hidden vectors [B, 1, d], without gradient.

        Updates `streams` in place.
        """
        self.check_step(ids, streams)
        embedded = self.embedding(ids)
        if isinstance(streams, GroupedStreams):
            return streams.step(embedded, self.extend_embedded)
        return self.step_embedded(embedded, streams)

    @torch.no_grad()
    def step_embedded(self, embedded: Tensor, streams: BackboneState, *, inputs: list[Tensor] | None = None) -> Tensor:
        """Like `step`, in place and for embedded tokens. The input of each block is appended to `inputs`."""
        self._check_joined(streams)
        _check_one_each(embedded, streams.position.shape[0])
        at_once = self._step_at_once(embedded, streams) if inputs is None else None
        if at_once is not None:
            return at_once
        layouts = self._layouts(lambda mixer: mixer.step_layout(streams.position))
        x = self._first_input(embedded, layouts[0].positions)
        for block, block_streams, layout in zip(self.blocks, streams.blocks, layouts, strict=True):
            if inputs is not None:
                inputs.append(x)
            x = block.step(x, block_streams, layout)
        out: Tensor = self.norm(x)
        return out

    def _step_at_once(self, embedded: Tensor, streams: BackboneState) -> Tensor | None:
        """`step_embedded` with all blocks in a single C++ function, or None if no function computes the same."""
        # Not len(embedded), which would make the batch size of an exported step a constant.
        stack = self._flash_stack(embedded.shape[0])
        if stack is None:
            return None
        layout = stack.step_layout(streams.position)
        read = stack.step(self._first_input(embedded, layout.positions), streams.blocks, layout)
        return None if read is None else self.norm(read)

    @property
    def has_native_step(self) -> bool:
        """Whether a single C++ function computes the step of all blocks, for a small number of streams."""
        with torch.no_grad():
            return self._flash_stack(1) is not None

    def _flash_stack(self, n_streams: int) -> FlashStack | None:
        return flash_stack(cast("nn.Module", self.blocks), self._mixers_in_a_row, n_streams)

    def _mixers_in_a_row(self) -> list[Mixer[Any]]:
        """All mixers if the blocks consist of nothing else; otherwise an empty list."""
        if any(type(block) is not Block or type(block.feed_forward) is not nn.Identity for block in self.blocks):
            return []
        return [block.mixer for block in self.blocks]

    def _first_input(self, embedded: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """The input of the first block, [B, T, d]. Positions: [T] or [B, T]. Token types: int [B, T]; None for all 0."""
        x = embedded if self.position is None else embedded + self.position(positions)
        if token_types is not None:
            self._check_types(token_types, embedded)
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

    def _check_states(self, argument: str, given: object) -> None:
        """Raise ArgumentError unless `given` holds one state per block."""
        blocks = len(list(self.blocks))
        if not isinstance(given, BackboneState):
            raise ArgumentError(
                argument, f"is of type {type(given).__name__}, but must be a state, as init_state and extend return it."
            )
        if len(given.blocks) != blocks:
            raise ArgumentError(argument, f"belongs to a model with {len(given.blocks)} blocks, but this model has {blocks}.")

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


def _check_one_each(tokens: Tensor, streams: int) -> None:
    """Raise ArgumentError unless `tokens` holds exactly one token for each of the `streams` streams."""
    if tokens.shape[:2] != (streams, 1):
        raise ArgumentError("ids", f"has shape {list(tokens.shape[:2])}, but must be [{streams}, 1], one token per stream.")
