"""The state of a causal model for a batch of streams, used in place of transformers' cache of keys and values.

For FLASH and the linear attentions, its size does not depend on the length of the streams.

Shapes: B streams, N new tokens, d model width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.generation.prompts import pieces
from lineartime.hf.inputs import real_tokens
from lineartime.models.backbone import Backbone, ModelState
from lineartime.models.decoder import MAX_STREAMS, NativeDecoder, native_decoder

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache in transformers: among the arguments of a model, in its outputs, and in `generate`; new in 5.24."""
REREAD = 64
"""The undone tokens that are read again together with the next ones; more are read before them, once."""

Tokens = tuple[Tensor, Tensor | None]
"""Embedded tokens [B, N, d], and which of them are real, bool [B, N]; None if all are."""


class LineartimeCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """The state of a batch of streams: `model(ids, cache=cache)` continues them and updates the cache.

    `generate` creates one by itself, and with return_dict_in_generate=True it returns one to continue from, as `CACHE`.
    Streams may be at different positions, as they are after a batch that is padded on the left. A cache belongs to one model,
    whose weights must not change meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._recording = False
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: ModelState | None = None
        self._length = 0
        self._recorded: list[tuple[ModelState | None, Tokens]] = []  # the state before each call, and what it read
        self._unread: Tokens | None = None  # what `crop` left of a call: the state has not read it
        self._decoder: NativeDecoder | None = None
        self._is_prepared = False

    def extend(
        self,
        backbone: Backbone,
        embedded: Tensor,
        mask: Tensor | None,
        *,
        prefix: bool = False,
        inputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Continue the streams by embedded tokens: [B, N, d] -> [B, N, d], zero at padding.

        Args:
            backbone: the model, the same one at every call.
            embedded: [B, N, d].
            mask: bool [B, N], True for real tokens; None if all are real.
            prefix: whether the tokens are a prefix, which is read bidirectionally, before all others. `crop` cannot forget it.
            inputs: an empty list that receives the input of each block, [B, N, d] each.

        Raises:
            ArgumentError: for another number of streams.
        """
        known, new = self.batch_size, embedded.shape[1]
        if known not in (-1, len(embedded)):
            raise ArgumentError(
                CACHE,
                f"is the cache of {known} streams, but the batch has {len(embedded)}: continue the same streams, or begin "
                "without one.",
            )
        if prefix:
            hidden, self.state = backbone.read_prefix(embedded, mask, inputs=inputs)
            self._length += new
            return hidden
        if self._unread is not None and self._unread[0].shape[1] > REREAD:
            self._read(backbone, *self._unread)
            self._unread = None
        if self._unread is not None:
            both: list[Tokens] = [self._unread, (embedded, mask)]
            if any(real is not None for _, real in both):
                mask = torch.cat([real_tokens(real, tokens) for tokens, real in both], 1)
            embedded = torch.cat([tokens for tokens, _ in both], 1)
        before = self.state.clone() if self._recording and self.state is not None else None
        hidden = self._read(backbone, embedded, mask, inputs)
        if self._recording:
            self._recorded.append((before, (embedded.detach(), mask)))
        self._unread = None
        self._length += new
        first = embedded.shape[1] - new
        if inputs:
            inputs[:] = [each[:, first:] for each in inputs]
        return hidden[:, first:]

    def _read(self, backbone: Backbone, embedded: Tensor, mask: Tensor | None, inputs: list[Tensor] | None = None) -> Tensor:
        """[B, N, d] -> [B, N, d]; the input of each block is appended to `inputs`. A call that fails leaves the state."""
        is_token = embedded.shape[1] == 1 and mask is None and inputs is None
        if self.state is not None and is_token and not torch.is_grad_enabled():
            if not self._is_prepared:
                self._decoder, self._is_prepared = native_decoder(backbone, None), True
            if self._decoder is not None and 0 < len(embedded) <= MAX_STREAMS and not torch.is_autocast_enabled("cpu"):
                return self._decoder.hidden(embedded.contiguous(), self.state)
        read, state = [], self.state
        parts = [embedded] if inputs is not None else pieces(embedded)  # hidden vectors of all tokens are held anyway
        masks = [None] * len(parts) if mask is None else mask.split(parts[0].shape[1], 1)
        for part, of_part in zip(parts, masks, strict=True):
            hidden, state = backbone.extend(part, state, of_part, inputs=inputs)
            read.append(hidden)
        self.state = state
        return torch.cat(read, 1)

    def copy(self) -> "LineartimeCache":
        """A cache with the same state; continuing one of the two does not change the other."""
        copy = LineartimeCache()
        copy._length, copy._unread = self._length, self._unread
        copy.state = None if self.state is None else self.state.clone()
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "LineartimeCache":
        return self.copy()

    # Undoing calls -----------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Record what `crop` needs from now on: all that was read since the last `crop`."""
        self._recording = True

    def stop_past_recording(self) -> None:
        """Stop recording, so that the memory of the cache does not grow with what it reads."""
        self._recording, self._recorded = False, []

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens read since the last crop; their number is given as a negative number.

        Nothing is computed. The cache returns to the state before the calls that read them. The tokens of these calls that
        are kept are read again with the next tokens.

        Raises:
            ArgumentError: for a positive number.
            LineartimeError: for more tokens than were recorded; those of a prefix are not.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(
                "tokens_to_remove", f"is {tokens_to_remove}, but must be negative, or 0: -5 forgets five tokens."
            )
        left = -tokens_to_remove
        if left > sum(embedded.shape[1] for _, (embedded, _) in self._recorded):
            raise LineartimeError(
                f"The cache cannot forget {-tokens_to_remove} tokens: it can only take back what was read since the last crop, "
                "after activate_past_recording(), and no prefix."
            )
        while left > 0:
            self.state, (embedded, real) = self._recorded.pop()
            left -= embedded.shape[1]
            self._unread = (embedded[:, :-left], None if real is None else real[:, :-left]) if left < 0 else None
        self._length += tokens_to_remove
        self._recorded = []

    # The interface of a cache in transformers --------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens read so far, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, because there is no limit."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the streams, in this order; a stream may be kept several times."""
        self.state = None if self.state is None else self.state.take(indices)

        def chosen(tokens: Tokens) -> Tokens:
            return tokens[0][indices], None if tokens[1] is None else tokens[1][indices]

        self._unread = None if self._unread is None else chosen(self._unread)
        self._recorded = [
            (None if before is None else before.take(indices), chosen(tokens)) for before, tokens in self._recorded
        ]

    reorder_cache = batch_select_indices  # for beam search

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each stream by `repeats` copies, side by side."""
        if self.batch_size > 0:
            self.batch_select_indices(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def __len__(self) -> int:
        """The number of blocks; 0 before the first token."""
        return 0 if self.state is None else len(self.state.blocks)

    def __repr__(self) -> str:
        return f"LineartimeCache(streams={max(self.batch_size, 0)}, tokens={self._length}, bytes={self.memory_bytes})"

    @property
    def batch_size(self) -> int:
        """The number of streams; -1 before the first token."""
        if self.state is None:
            return -1 if self._unread is None else len(self._unread[0])
        return len(self.state)

    @property
    def memory_bytes(self) -> int:
        """The memory of the state, in bytes."""
        return 0 if self.state is None else self.state.nbytes

    @property
    def is_linear(self) -> list[bool]:
        """False, so that `generate` leaves out the tokens that were read when it goes on from a cache."""
        return [False]

    @property
    def is_initialized(self) -> bool:
        """Whether any token was read."""
        return self.state is not None
