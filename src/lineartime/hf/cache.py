"""The state of a causal model for a batch of streams, used in place of transformers' cache of keys and values.

For FLASH and the linear attentions, its size does not depend on the length of the streams.

Shapes: B streams, N new tokens, d model width.
"""

from typing import Any, NamedTuple

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
"""The tokens of an undone call that are read again together with the next ones; more are read before them, once."""


class Call(NamedTuple):
    """A call that can be undone.

    Attributes:
        embedded: [B, N, d], the embedded tokens that are read.
        mask: bool [B, N], True for real tokens; None if all are real.
        prefix: whether the tokens are read as a prefix, bidirectionally.
        before: the state before the call; None if there was none.
    """

    embedded: Tensor
    mask: Tensor | None
    prefix: bool = False
    before: ModelState | None = None

    @property
    def tokens(self) -> int:
        """N."""
        return self.embedded.shape[1]

    def first(self, tokens: int) -> "Call":
        """The same call with the first tokens alone."""
        return self._replace(embedded=self.embedded[:, :tokens], mask=None if self.mask is None else self.mask[:, :tokens])

    def then(self, embedded: Tensor, mask: Tensor | None) -> "Call":
        """The same call with more tokens."""
        if self.mask is not None or mask is not None:
            mask = torch.cat([real_tokens(self.mask, self.embedded), real_tokens(mask, embedded)], 1)
        return self._replace(embedded=torch.cat([self.embedded, embedded], 1), mask=mask)

    def take(self, rows: Tensor) -> "Call":
        """The same call restricted to some of the streams."""
        mask, before = None if self.mask is None else self.mask[rows], None if self.before is None else self.before.take(rows)
        return Call(self.embedded[rows], mask, self.prefix, before)


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
        self._calls: list[Call] = []
        self._kept: Call | None = None  # what is left of an undone call: the state has not read it
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
        """Continue the streams.

        Args:
            backbone: the model, the same one at every call.
            embedded: [B, N, d], embedded tokens.
            mask: bool [B, N], True for real tokens; None if all are real.
            prefix: whether the first tokens of the streams are a prefix, which is read bidirectionally.
            inputs: an empty list that receives the input of each block, [B, N, d] each.

        Returns:
            [B, N, d], zero at padding.

        Raises:
            ArgumentError: for another number of streams.
        """
        known, kept = self.batch_size, self._kept
        if known not in (-1, len(embedded)):
            raise ArgumentError(
                CACHE,
                f"is the cache of {known} streams, but the batch has {len(embedded)}: continue the same streams, or begin "
                "without one.",
            )
        if kept is not None and (kept.prefix or kept.tokens > REREAD):
            self._read(backbone, kept)
            self._kept = kept = None
        call = Call(embedded, mask, prefix) if kept is None else kept.then(embedded, mask)
        before = self.state.clone() if self._recording and self.state is not None else None
        hidden = self._read(backbone, call, inputs)
        if self._recording:
            self._calls.append(call._replace(embedded=call.embedded.detach(), before=before))
        self._kept = None
        self._length += embedded.shape[1]
        first = call.tokens - embedded.shape[1]
        if inputs:
            inputs[:] = [each[:, first:] for each in inputs]
        return hidden[:, first:]

    def _read(self, backbone: Backbone, call: Call, inputs: list[Tensor] | None = None) -> Tensor:
        """[B, N, d] -> [B, N, d]; the input of each block is appended to `inputs`. A call that fails leaves the state."""
        embedded, mask = call.embedded, call.mask
        if call.prefix:
            hidden, self.state = backbone.read_prefix(embedded, mask, inputs=inputs)
            return hidden
        if self.state is not None and call.tokens == 1 and mask is None and inputs is None and not torch.is_grad_enabled():
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
        copy._length, copy._kept = self._length, self._kept
        copy.state = None if self.state is None else self.state.clone()
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "LineartimeCache":
        """`copy`: what is prepared for the model is not copied."""
        return self.copy()

    # Undoing calls -----------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Record what `crop` needs from now on: all that was read since the last `crop`."""
        self._recording = True

    def stop_past_recording(self) -> None:
        """Stop recording, so that the memory of the cache does not grow with what it reads."""
        self._recording, self._calls = False, []

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens read since the last crop; their number is given as a negative number.

        Nothing is computed. The cache returns to the state before the calls that read them. The tokens of these calls that
        are kept are read again with the next tokens.

        Raises:
            ArgumentError: for a positive number.
            LineartimeError: for more tokens than were recorded, or a part of a prefix, whose tokens have read each other.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(
                "tokens_to_remove", f"is {tokens_to_remove}, but must be negative, or 0: -5 forgets five tokens."
            )
        calls, call, left = list(self._calls), None, -tokens_to_remove
        while left > 0 and calls:
            call = calls.pop()
            left -= call.tokens
        if left > 0:
            raise LineartimeError(
                f"The cache cannot forget {-tokens_to_remove} tokens: it can only take back what was read since the last crop, "
                "and only after activate_past_recording()."
            )
        if call is not None:
            if call.prefix and left < 0:
                some = f"{call.tokens + left} of the {call.tokens} tokens of a prefix, which have read each other"
                raise LineartimeError(f"The cache cannot forget {some}: read the shorter prefix into a new cache.")
            self.state = call.before
            self._kept = call.first(-left) if left < 0 else None
        self._length += tokens_to_remove
        self._calls = []

    # The interface of a cache in transformers --------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens read so far, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, because there is no limit."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the streams, in this order; a stream may be kept several times."""
        if self.state is not None:
            self.state = self.state.take(indices)
        self._calls = [call.take(indices) for call in self._calls]
        if self._kept is not None:
            self._kept = self._kept.take(indices)

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
            return -1 if self._kept is None else len(self._kept.embedded)
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
