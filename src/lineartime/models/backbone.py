"""The stack that all models share: embedding, positions, blocks, norm.

Shapes: B batch, T tokens, N new tokens of a stream, d model width.
"""

from collections.abc import Iterable
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
from lineartime.ops.checks import as_mask, check_whole, is_readable
from lineartime.ops.context import ContextGroup, check_equal_slices
from lineartime.ops.packing import Packing, describe
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

    def forward(self, x: Tensor, packing: Packing, recompute: bool = False) -> Tensor:
        """Map the packed tokens of a batch, [N, d] -> [N, d].

        With `recompute`, only x is kept, and the backward pass recomputes the block.
        """
        out: Tensor
        if recompute and torch.is_grad_enabled():
            out = checkpoint(self.forward, x, packing, use_reentrant=False)
        else:
            out = self.feed_forward(self.mixer(x, packing=packing))
        return out


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
        # Whether torch.nn.Module.compile has been called on a block, which PyTorch shows in this attribute alone.
        compiled = any(block._compiled_call_impl is not None for block in self.blocks)
        options: dict[str, Any] = {"device": embedded.device, "context": context, "one_grid": compiled}
        packing = self._pickiest.describe(embedded.shape, mask, cu_seqlens, prefix_lengths, **options)
        if context is not None:
            check_equal_slices(embedded.shape[:2], context, embedded.device)
        if token_types is not None:
            if self.token_types is None:
                raise ArgumentError("token_types", "is given, but this model has none: leave it out.")
            self.check_ids(token_types, "token_types", self.token_types)
            if token_types.shape != embedded.shape[:2]:
                wanted = list(embedded.shape[:2])
                raise ArgumentError("token_types", f"has shape {list(token_types.shape)}, but must be [B, T] = {wanted}.")
            token_types = packing.pack(token_types)
        x = self.first_input(packing.pack(embedded), packing, token_types)
        for block in self.blocks:
            if inputs is not None:
                inputs.append(packing.unpack(x))
                x = packing.pack(inputs[-1])  # so that gradients pass what is handed out
            if compiled:
                block.mixer.prepare(packing)
            x = block(x, packing, self.recompute and self.training)
        return packing.unpack(self.norm(x))

    forward = read  # hooks run where the module itself is called

    @property
    def _pickiest(self) -> Mixer:
        """The mixer that describes a batch for all of them: one that refuses a prefix or a context, if there is one."""
        mixers = [block.mixer for block in self.blocks]
        without_prefix = [mixer for mixer in mixers if not mixer.reads_prefix]
        return (without_prefix or [mixer for mixer in mixers if not mixer.splits_context] or mixers)[0]

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
        packing = describe(embedded.shape, device=embedded.device, mask=mask, position=state.position)
        x = self.first_input(packing.pack(embedded), packing)
        states = []
        for block, of_block in zip(self.blocks, state.blocks, strict=True):
            if inputs is not None:
                inputs.append(packing.unpack(x))
            x, of_block = block.mixer.extend(x, of_block, packing=packing)
            x = block.feed_forward(x)
            states.append(of_block)
        return packing.unpack(self.norm(x)), ModelState(tuple(states))

    def read_prefix(
        self, tokens: Tensor, mask: Tensor | None = None, *, inputs: list[Tensor] | None = None
    ) -> tuple[Tensor, ModelState]:
        """Start streams with a prefix that is read bidirectionally: tokens as of `read` -> [B, N, d], and the state."""
        embedded = self.embed(tokens)
        (rows, length), device = embedded.shape[:2], embedded.device
        mask = as_mask("mask", mask, rows, length, device)
        whole = torch.full((rows,), length, device=device) if mask is None else mask.sum(1)
        packing = self._pickiest.describe(embedded.shape, mask, None, whole, device=device)
        state = self.init_state(rows)
        stream = describe(embedded.shape, device=device, mask=mask, position=state.position)
        x = packing.unpack(self.first_input(packing.pack(embedded), packing))
        states = []
        for block, of_block in zip(self.blocks, state.blocks, strict=True):
            if inputs is not None:
                inputs.append(x)
            states.append(block.mixer.extend(stream.pack(x), of_block, packing=stream)[1])
            x = packing.unpack(block(packing.pack(x), packing))
        return self.norm(x), ModelState(tuple(states))

    def first_input(self, embedded: Tensor, packing: Packing, token_types: Tensor | None = None) -> Tensor:
        """The input of the first block, [N, d]. Token types: int [N]; None for all 0."""
        x = embedded
        if self.position is not None:
            rows = x.view(packing.sharing, packing.position.shape[0], x.shape[-1])
            x = (rows + self.position(packing.position)).flatten(0, 1)
        if self.token_types is not None:
            x = x + (self.token_types.weight[0] if token_types is None else self.token_types(token_types))
        normed: Tensor = self.embedding_norm(x)
        return normed

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

    def check_ids(self, ids: Tensor, argument: str = "ids", table: nn.Embedding | None = None) -> None:
        """Raise ArgumentError unless `ids` [B, T] are rows of a table, by default of the token embedding, on its device."""
        table = self.embedding if table is None else table
        check_whole(argument, ids)
        if ids.dim() != 2:
            raise ArgumentError(argument, f"has shape {list(ids.shape)}, but must be [B, T].")
        check_device(argument, ids, table)
        if is_readable(ids):
            low, high = (int(value) for value in ids.aminmax())
            rows = table.weight.shape[0]  # the wrapper of PEFT has no num_embeddings
            if low < 0 or high >= rows:
                wrong, size = low if low < 0 else high, "vocab_size" if table is self.embedding else argument
                raise ArgumentError(argument, f"holds {wrong}, but must be from 0 to {size} - 1 = {rows - 1}.")
