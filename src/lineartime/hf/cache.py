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
from lineartime.models.backbone import Backbone, ModelState
from lineartime.models.decoder import MAX_STREAMS, NativeDecoder, native_decoder

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache in transformers: among the arguments of a model, in its outputs, and in `generate`; new in 5.24."""


class LineartimeCache(Cache):  # type: ignore[misc]  # transformers has no types here
    """The state of a batch of streams: `model(ids, cache=cache)` continues them and updates the cache.

    `generate` creates one by itself, and with return_dict_in_generate=True it returns one to continue from, as `CACHE`.
    Streams may be at different positions, as they are after a batch that is padded on the left. A cache belongs to one model,
    whose weights must not change meanwhile. It cannot be taken back, as `crop` of other caches does.
    """

    is_croppable = False
    is_linear = (False,)  # so that `generate` leaves out the tokens that were read when it goes on from a cache

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.state: ModelState | None = None
        self._length = 0
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
        """Continue the streams by embedded tokens: [B, N, d] -> [B, N, d], zero at padding. A call that fails changes nothing.

        Args:
            backbone: the model, the same one at every call.
            embedded: [B, N, d].
            mask: bool [B, N], True for real tokens; None if all are real.
            prefix: whether the tokens are a prefix, which is read bidirectionally, before all others.
            inputs: an empty list that receives the input of each block, [B, N, d] each.

        Raises:
            ArgumentError: for another number of streams.
        """
        if self.state is not None and len(self.state) != len(embedded):
            what = f"is the cache of {len(self.state)} streams, but the batch has {len(embedded)}"
            raise ArgumentError(CACHE, f"{what}: continue the same streams, or begin without one.")
        is_token = embedded.shape[1] == 1 and mask is None and inputs is None and not torch.is_grad_enabled()
        if prefix:
            hidden, self.state = backbone.read_prefix(embedded, mask, inputs=inputs)
        elif is_token and self.state is not None and (decoder := self._token_decoder(backbone, len(embedded))) is not None:
            hidden = decoder.hidden(embedded.contiguous(), self.state)
        else:
            read, state = [], self.state
            parts = [embedded] if inputs is not None else pieces(embedded)  # hidden vectors of all tokens are held anyway
            masks = [None] * len(parts) if mask is None else mask.split(parts[0].shape[1], 1)
            for part, of_part in zip(parts, masks, strict=True):
                out, state = backbone.extend(part, state, of_part, inputs=inputs)
                read.append(out)
            hidden, self.state = torch.cat(read, 1), state
        self._length += embedded.shape[1]
        return hidden

    def _token_decoder(self, backbone: Backbone, streams: int) -> NativeDecoder | None:
        """What reads single tokens on a CPU, made from the weights at the first one; None if nothing does here."""
        if not self._is_prepared:
            self._decoder, self._is_prepared = native_decoder(backbone, None), True
        return None if torch.is_autocast_enabled("cpu") or not 0 < streams <= MAX_STREAMS else self._decoder

    def copy(self) -> "LineartimeCache":
        """A cache with the same state; continuing one of the two does not change the other."""
        copy = LineartimeCache()
        copy._length = self._length
        copy.state = None if self.state is None else self.state.clone()
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "LineartimeCache":
        return self.copy()

    # The interface of a cache in transformers --------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Raise LineartimeError: a state cannot forget the last tokens alone."""
        raise LineartimeError("The cache of these models cannot forget its last tokens: keep a copy() of it from before them.")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens read so far, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1, because there is no limit."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the streams, in this order; a stream may be kept several times."""
        self.state = None if self.state is None else self.state.take(indices)

    reorder_cache = batch_select_indices  # for beam search

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each stream by `repeats` copies, side by side."""
        if self.state is not None:
            self.batch_select_indices(torch.arange(len(self.state), device="cpu").repeat_interleave(repeats))

    def __len__(self) -> int:
        """The number of blocks; 0 before the first token."""
        return 0 if self.state is None else len(self.state.blocks)

    def __repr__(self) -> str:
        return f"LineartimeCache(streams={max(self.batch_size, 0)}, tokens={self._length}, bytes={self.memory_bytes})"

    @property
    def batch_size(self) -> int:
        """The number of streams; -1 before the first token."""
        return -1 if self.state is None else len(self.state)

    @property
    def memory_bytes(self) -> int:
        """The memory of the state, in bytes."""
        return 0 if self.state is None else self.state.nbytes

    @property
    def is_initialized(self) -> bool:
        """Whether any token was read."""
        return self.state is not None
