"""The state of a causal model for a batch of streams, used in place of transformers' cache of keys and values.

For FLASH and the linear attentions, its size does not depend on the length of the streams.

Shapes: B streams, N new tokens, d model width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.hf.streams import prefix_reader, reader, step_streams, width
from lineartime.layers.streams import (
    RaggedState,
    count_streams,
    extend_ragged,
    group_streams,
    single_streams,
    take_streams,
    tensors_of,
)
from lineartime.models.backbone import Backbone
from lineartime.models.streams import BackboneState, GroupedStreams, is_joined
from lineartime.ops.cache import normal_tensors

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache in transformers: among the arguments of a model, in its outputs, and in `generate`; new in 5.24."""


class Call(NamedTuple):
    """A call that can be undone.

    Attributes:
        before: the state before the call; None if there was none.
        embedded: [B, N, d], the embedded tokens that were read.
        mask: bool [B, N], True for real tokens.
        prefix: whether the tokens were read as a prefix.
    """

    before: BackboneState | RaggedState | None
    embedded: Tensor
    mask: Tensor
    prefix: bool

    def without_last(self, tokens: int) -> "Call":
        """The same call with `tokens` fewer tokens at its end."""
        kept = self.embedded.shape[1] - tokens
        return self._replace(embedded=self.embedded[:, :kept], mask=self.mask[:, :kept])

    def of_streams(self, rows: Tensor) -> "Call":
        """The same call restricted to some of the streams."""
        before = None if self.before is None else take_streams(self.before, rows)
        return Call(before, self.embedded[rows], self.mask[rows], self.prefix)


class LineartimeCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """The state of a batch of streams: `model(ids, cache=cache)` continues them and updates the cache.

    `generate` creates one by itself, and with return_dict_in_generate=True it returns one to continue from, as `CACHE`.
    Streams may be at different positions, as they are after a batch that is padded on the left.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: BackboneState | RaggedState | None = None
        self._length = 0
        self._recording = False
        self._calls: list[Call] = []
        self._pending: Call | None = None

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
            inputs: a list that receives the input of each block, [B, N, d] each.

        Returns:
            [B, N, d], zero at padding.
        """
        self._check_batch(len(embedded))
        new = embedded.shape[1]
        if self._pending is not None:  # tokens of an undone call that are kept and have to be read again
            embedded = torch.cat([self._pending.embedded, embedded], 1)
            mask = torch.cat([self._pending.mask, _as_mask(mask, len(embedded), new, embedded.device)], 1)
        if mask is not None and bool(mask.all()):
            mask = None
        self._prepare_to_read(backbone, embedded.shape[1])
        call = self._call(embedded, mask, prefix) if self._recording else None
        hidden = self._read(backbone, embedded, mask, prefix, inputs is not None)[:, embedded.shape[1] - new :]
        self._length += new
        self._pending = None
        self._calls += [] if call is None else [call]
        *before, last = hidden.split(embedded.shape[-1], dim=-1)
        if inputs is not None:
            inputs.extend(before)
        out: Tensor = last
        return out

    def copy(self) -> "LineartimeCache":
        """A cache with the same state; continuing one of the two does not change the other."""
        copy = LineartimeCache()
        copy.state, copy._length, copy._pending = self.state, self._length, self._pending
        if is_joined(self.state):  # all other states are never changed in place
            copy.batch_select_indices(torch.arange(self.batch_size, device=next(tensors_of(self.state)).device))
        return copy

    def _prepare_to_read(self, backbone: Backbone, new: int) -> None:
        """Join the streams to continue them in place by one token, and separate them to read more at once.

        Autograd and `crop` need the state as it was before a call, so it is not updated in place for them.
        """
        in_place = new == 1 and backbone.steps_in_place and not self._recording and not torch.is_grad_enabled()
        if is_joined(self.state):
            if not in_place:
                streams = backbone.separate_streams(self.state)
                self.state = group_streams(streams) if streams else backbone.init_state(0)
        elif self.state is not None and in_place and self.batch_size:
            joined = backbone.join_streams(single_streams(self.state))
            assert not isinstance(joined, GroupedStreams)  # the backbone steps in place
            self.state = joined

    def _read(self, backbone: Backbone, embedded: Tensor, mask: Tensor | None, prefix: bool, every: bool) -> Tensor:
        """[B, N, d] -> [B, N, d], or [B, N, (L + 1) d] with the inputs of all blocks in front."""
        state, first = self.state, self.state is None
        if state is None:
            state = backbone.init_state(len(embedded))
        if is_joined(state):
            return step_streams(backbone, embedded, mask, state, every)
        read = prefix_reader(backbone, every) if first and prefix else reader(backbone, every)
        hidden, self.state = extend_ragged(read, embedded, state, mask)
        missing = width(backbone, every) - hidden.shape[-1]  # if all is padding, nothing has read the blocks
        return F.pad(hidden, (0, missing)) if missing else hidden

    def _check_batch(self, batch: int) -> None:
        known = self.batch_size
        if known not in (-1, batch):
            raise ArgumentError(
                CACHE,
                f"is the cache of {known} streams, but the batch has {batch}: continue the same streams, or begin without one.",
            )

    # Undoing calls -----------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Record what `crop` needs from now on: all that was read since the last `crop`."""
        self._recording = True

    def stop_past_recording(self) -> None:
        """Stop recording, so that the memory of the cache does not grow with what it reads."""
        self._recording, self._calls = False, []

    def _call(self, embedded: Tensor, mask: Tensor | None, prefix: bool) -> Call:
        assert not is_joined(self.state)  # which the call would change in place
        batch, length = embedded.shape[:2]
        return Call(self.state, embedded.detach(), _as_mask(mask, batch, length, embedded.device), prefix)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens read since the last crop; their number is given as a negative number.

        Nothing is computed. The cache returns to the state before the calls that read them. The tokens of these calls that
        are kept are read again together with the next tokens.

        Raises:
            ArgumentError: for a positive number.
            LineartimeError: for more tokens than were recorded, or a part of a prefix, whose tokens have read each other.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(
                "tokens_to_remove", f"is {tokens_to_remove}, but must be negative, or 0: -5 forgets five tokens."
            )
        remove = -tokens_to_remove
        if not 0 <= remove <= sum(call.embedded.shape[1] for call in self._calls):
            raise LineartimeError(
                f"The cache cannot forget {remove} tokens: it can only take back what was read since the last crop, and only "
                "after activate_past_recording()."
            )
        left = remove
        for call in reversed(self._calls):
            if call.prefix and 0 < left < call.embedded.shape[1]:
                raise LineartimeError(
                    f"The cache cannot forget {left} of the {call.embedded.shape[1]} tokens of a prefix, which have read each "
                    "other: read the shorter prefix into a new cache."
                )
            left -= min(left, call.embedded.shape[1])
        self._length -= remove
        while remove:
            call = self._calls.pop()
            tokens = call.embedded.shape[1]
            self.state = call.before
            self._pending = call.without_last(remove) if remove < tokens else None
            remove -= min(remove, tokens)
        self._calls = []

    # The interface of a cache in transformers --------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens read so far, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, because there is no limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the streams by a selection of them, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the streams, in this order; a stream may be kept several times."""
        if self.state is not None:
            with normal_tensors():  # which a step can update outside of inference mode, too
                self.state = take_streams(self.state, indices)
        self._calls = [call.of_streams(indices) for call in self._calls]
        if self._pending is not None:
            self._pending = self._pending.of_streams(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each stream by `repeats` copies, side by side."""
        if self.batch_size > 0:
            device = next(tensors_of(self.state)).device
            self.batch_select_indices(torch.arange(self.batch_size, device=device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self._length, self._calls, self._pending = None, 0, [], None

    def __len__(self) -> int:
        """The number of blocks; 0 before the first token."""
        one = self.state.states[0] if isinstance(self.state, RaggedState) else self.state
        return 0 if one is None else len(one.blocks)

    def __repr__(self) -> str:
        return f"LineartimeCache(streams={max(self.batch_size, 0)}, tokens={self._length}, bytes={self.memory_bytes})"

    @property
    def batch_size(self) -> int:
        """The number of streams; -1 before the first token."""
        if self.state is None:
            return -1 if self._pending is None else len(self._pending.embedded)
        return count_streams(self.state)

    @property
    def memory_bytes(self) -> int:
        """The memory of the state, in bytes."""
        states = self.state.states if isinstance(self.state, RaggedState) else self.state
        return 0 if states is None else sum(tensor.nbytes for tensor in tensors_of(states))

    @property
    def is_compileable(self) -> bool:
        """False: every call makes new tensors for the state."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """False, so that `generate` leaves out the tokens that were read when it goes on from a cache."""
        return [False]

    @property
    def is_initialized(self) -> bool:
        """Whether any token was read."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """True: see `crop`."""
        return True


def _as_mask(mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
