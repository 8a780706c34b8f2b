"""The base of a mixer, a layer that moves information between tokens: one verb for whole sequences, one for streams.

Shapes: B batch or streams, T tokens, N new tokens of a stream, D documents of a pack, d model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers.residual import LayerOptions, ResidualLayer
from lineartime.ops.backends import BACKENDS, Backend, note_old_gpus
from lineartime.ops.batch import Batch, Needs
from lineartime.ops.checks import as_mask
from lineartime.ops.context import ContextGroup
from lineartime.ops.make_batch import make_batch, stream_batch
from lineartime.ops.state import State
from lineartime.ops.token_shift import shift_next, shift_tokens, shifted_width

READ_PREFIX = "GAU, FLASH with the memory sum or mesa, and softmax attention"  # the mixers that can, for messages


class MixerOptions(LayerOptions, total=False):
    """What every mixer takes: see `Mixer`."""

    causal: bool
    token_shift: bool


_ADVICE = "give it the state that init_state or extend of the same layer returned"


@dataclass(eq=False)
class ShiftedState(State):
    """What a mixer with a token shift remembers of streams.

    Attributes:
        last: [B, h], the normed features of the last token that are shifted into the next one.
        own: the state of the mixer itself.
    """

    last: Tensor
    own: Any

    @property
    def position(self) -> Tensor:
        """int64 [B], the number of tokens that each stream has read."""
        position: Tensor = self.own.position
        return position


class Mixer(ResidualLayer, ABC):
    """Base of the layers that move information between tokens: the contract they share.

    y = mixer(x, mask=None, cu_seqlens=None) reads whole sequences. A causal mixer also reads streams, by any number of new
    tokens: y, state = mixer.extend(x, state). The norm, the token shift, padding, packs and the residual are done here. A
    subclass implements what is between them: `mix` and, if it can be causal, `mix_next` and `init_own_state`.

    Args:
        causal: whether a token attends only to itself and earlier tokens; required for streaming.
        token_shift: whether the first half of each normed token's features is taken from the previous token, with zeros for the
            first token of a document; see `lineartime.ops.token_shift`.
        **options: the options of `ResidualLayer`.
    """

    why_not_causal: ClassVar[str | None] = None
    """Why a mixer cannot be causal, as the end of a sentence; None for a mixer that can be."""
    why_only_causal: ClassVar[str | None] = None
    """Why a mixer must be causal, as the end of a sentence; None for a mixer that need not be."""
    splits_context: bool = False
    """Whether it supports sequences that are split over several processes."""
    reads_prefix: bool = False
    """Whether a causal mixer can attend bidirectionally within the first tokens of a sequence."""
    any_positions: ClassVar[bool] = False
    """Whether `mix_next` takes streams at different positions and with padding; others get one such group after another."""
    constant_state: bool = False
    """Whether one token of each stream updates the state in place, so that a step can be recorded or exported."""
    backend: Backend | None = None
    """The implementation of its attention, if there are several: see `set_backend`."""
    backends: ClassVar[tuple[str, ...]] = BACKENDS
    """Those that `backend` may be, where it is not None."""

    def __init__(
        self, d_model: int, *, causal: bool = False, token_shift: bool = False, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(d_model, **options)
        note_old_gpus()
        if causal and self.why_not_causal is not None:
            raise ArgumentError("causal", f"is True, but {type(self).__name__} must have causal=False: {self.why_not_causal}.")
        if not causal and self.why_only_causal is not None:
            raise ArgumentError("causal", f"is False, but {type(self).__name__} must have causal=True: {self.why_only_causal}.")
        self.causal = causal
        self.token_shift = token_shift
        self._no_streams: Any = None

    @property
    def longest_sequence(self) -> int | None:
        """The maximum length of a sequence, or None if there is no limit."""
        return None

    @property
    def title(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    @property
    def any_parameter(self) -> Tensor:
        """One of the parameters, which tells the dtype and device of new states; any projection may be another module."""
        return next(self.parameters())

    def init_at_depth(self, block: int, n_blocks: int) -> None:
        """Initialise again what depends on the depth, block 0 ... n_blocks - 1; a layer that is built alone is block 0 of 1."""

    @abstractmethod
    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        """Map whole sequences of normed tokens to what is added to the tokens: [B, T, d] -> [B, T, d]."""

    def mix_next(self, normed: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Do the same for N more tokens of streams, [B, N, d], and return the new state; `state` may be overwritten."""
        raise NotImplementedError

    def init_own_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams, for `mix_next`; only called for a causal mixer."""
        raise NotImplementedError

    def first_position(self, batch_size: int) -> Tensor:
        """The position of streams before their first token, int64 [B]."""
        return torch.zeros(batch_size, dtype=torch.long, device=self.any_parameter.device)

    def needs(self) -> Needs:
        """What the mixer needs to know of a batch."""
        return Needs()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        batch: Batch | None = None,
    ) -> Tensor:
        """Process whole sequences at once.

        Args:
            x: [B, T, d].
            mask: [B, T], bool or integers 0 and 1, True for real tokens. Padding may be anywhere; its outputs are zero.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.
            prefix_lengths: int [B], or [D] with `cu_seqlens`, for a causal mixer: the number of real tokens at the start of
                each row, or document, that attend to each other bidirectionally. Later tokens attend causally.
            batch: inside a model, all of these in one, for tokens that it has packed: see `Batch.pack`.

        Returns:
            [B, T, d].

        Raises:
            ArgumentError: if shapes do not match, or a sequence is longer than the mixer allows.
            LineartimeError: if prefixes are given and the mixer does not support them.
        """
        in_model = batch is not None
        if batch is None:
            self.check_input(x)
            batch = self.describe(x.shape, mask, cu_seqlens, prefix_lengths, device=x.device)
            x = batch.pack(x)
        y = self.after(x, batch.by_part(self.mix, self.normed(x, batch)))
        return y if in_model else batch.unpack(y)

    def describe(
        self,
        shape: tuple[int, ...],
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        device: torch.device,
        context: ContextGroup | None = None,
        whole_chunks: bool = False,
    ) -> Batch:
        """Describe a batch [B, T, ...] with all that this mixer needs; see `make_batch`. Mixers with equal needs can share it.

        Raises:
            ArgumentError: if `mask`, `cu_seqlens` or `prefix_lengths` do not match the batch, or this mixer cannot split
                sequences over the processes of a `context`.
            LineartimeError: if prefixes are given and this mixer does not support them.
        """
        if prefix_lengths is not None:
            self.check_prefix()
        if context is not None and not self.splits_context:
            raise ArgumentError(
                "context",
                f"is given, but {self.title} needs its whole sequence in one process: only FLASH can split sequences "
                "over several.",
            )
        return make_batch(
            shape,
            mask,
            cu_seqlens,
            prefix_lengths,
            device=device,
            needs=self.needs(),
            context=context,
            whole_chunks=whole_chunks,
        )

    def normed(self, x: Tensor, batch: Batch) -> Tensor:
        """The input of `mix`: tokens after the norm and, if it is on, the token shift."""
        normed = self.before(x)
        if self.token_shift:
            normed = shift_tokens(normed, None if batch.document is None else batch.positions, batch.context)
        return normed

    def init_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams; ArgumentError unless the mixer is causal."""
        self.check_causal()
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 0:
            raise ArgumentError("batch_size", f"is {batch_size!r}, but must be a non-negative integer.")
        own = self.init_own_state(batch_size)
        if not isinstance(own, State):
            found = f"{type(self).__name__}.init_own_state returned a {type(own).__name__}"
            raise LineartimeError(f"{found}, but must return a State: a dataclass of tensors [B, ...], one of them position.")
        if not self.token_shift:
            return own
        like = self.any_parameter
        return ShiftedState(torch.zeros(batch_size, shifted_width(self.d_model), dtype=like.dtype, device=like.device), own)

    def extend(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, *, batch: Batch | None = None
    ) -> tuple[Tensor, Any]:
        """Continue streams, at any positions, by N tokens; each has the same outputs as if it were continued alone.

        Args:
            x: [B, N, d].
            state: the state that `extend` returned, or None to begin B streams. It is consumed: its memory may be overwritten,
                so that `state.clone()` must be made before to continue it in another way, too.
            mask: [B, N], bool or integers 0 and 1, True for real tokens. Positions count only real tokens, so prompts of
                different lengths can be padded on the left, read in one call and continued without a mask.
            batch: inside a model, the description of the tokens, which it has packed.

        Returns:
            [B, N, d], with zeros at padding, and the new state.

        Raises:
            ArgumentError: if the mixer is not causal, shapes do not match, or the state has another batch size or layer.
        """
        in_model = batch is not None
        if batch is None:
            self.check_causal()
            self.check_input(x)
            mask = as_mask("mask", mask, x.shape[0], x.shape[1], x.device)
            state = self.init_state(x.shape[0]) if state is None else state
            self.check_state(state, x)
            batch = stream_batch(state.position, x.shape, mask, needs=self.needs())
            x = batch.pack(x)
        normed, last = self.before(x), None
        if isinstance(state, ShiftedState):
            normed, last = shift_next(normed, state.last, batch.counts)
            state = state.own
        if self.any_positions or (batch.start is not None and batch.counts is None):
            out, state = self.mix_next(normed, state, batch)
        else:
            out, state = by_position(self.mix_next, normed, state, batch, self.needs())
        y = self.after(x, out)
        return y if in_model else batch.unpack(y), state if last is None else ShiftedState(last, state)

    def read_prefix(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Begin streams with tokens that attend to each other bidirectionally; `extend` continues them causally.

        Args:
            x: [B, N, d].
            mask: [B, N], bool or integers 0 and 1, True for real tokens. Prefixes of different lengths are padded on the left.

        Returns:
            [B, N, d], as of `forward` with these tokens as prefixes, and the state, as `extend` returns it for them.

        Raises:
            LineartimeError: if the mixer is not causal or does not support prefixes, or shapes do not match.
        """
        self.check_prefix()
        _, state = self.extend(x, None, mask)
        return self.forward(x, mask, prefix_lengths=state.position), state

    def extra_repr(self) -> str:
        """The options and, if there are several, the implementation of the attention."""
        return super().extra_repr() + (f", backend={self.backend!r}" if self.backend else "")

    def check_state(self, state: Any, x: Tensor) -> None:
        """Raise ArgumentError unless a state is of this layer, and of as many streams as x [B, N, d] has."""
        if self._no_streams is None and not torch.compiler.is_compiling():  # a traced program must not change the layer
            self._no_streams = self.init_state(0)
        check_state(state, self._no_streams or self.init_state(0), type(self).__name__, x.device)
        streams, given = state.position.shape[0], x.shape[0]  # len would fix them
        if streams != given:
            raise ArgumentError(
                "state", f"is of {streams} streams, but there are tokens of {given}: give the state of these streams."
            )

    def check_prefix(self) -> None:
        """Raise LineartimeError unless this mixer is causal and supports prefixes."""
        if not self.reads_prefix:
            raise LineartimeError(f"{self.title} does not support prefixes: only {READ_PREFIX} do.")
        if not self.causal:
            problem = f"is False, but prefixes need a causal {type(self).__name__}"
            raise ArgumentError("causal", f"{problem}: build it with causal=True.")

    def check_causal(self) -> None:
        """Raise ArgumentError unless this mixer is causal, which streaming requires."""
        if not self.causal:
            why = self.why_not_causal
            advice = ": build it with causal=True" if why is None else f" and does not support causal=True: {why}"
            raise ArgumentError("causal", f"is False, so that {type(self).__name__} cannot stream{advice}.")


def by_position(
    mix_next: Callable[[Tensor, Any, Batch], tuple[Tensor, Any]], x: Tensor, state: Any, batch: Batch, needs: Needs
) -> tuple[Tensor, Any]:
    """Continue streams in groups that stand at one position and get the same number of tokens: [B, N, d] -> [B, N, d].

    Real tokens come first in their row. The outputs of others are zeros.
    """
    streams, new = x.shape[:2]
    counts = [new] * streams if batch.counts is None else batch.counts.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for row, group in enumerate(zip(state.position.tolist(), counts, strict=True)):
        groups.setdefault(group, []).append(row)
    out, parts = torch.zeros_like(x), []
    for (start, count), rows in groups.items():
        index = torch.tensor(rows, device=x.device)
        own = state.take(index)
        if count:
            here = replace(stream_batch(own.position, (len(rows), count), needs=needs), start=start)
            read, own = mix_next(x[index, :count], own, here)
            tokens = torch.arange(count, device=x.device)
            out = out.to(read.dtype).index_put((index[:, None], tokens), read)
        parts.append(own)
    if not parts:
        return out, state
    order = torch.tensor([row for rows in groups.values() for row in rows], device=x.device)
    return out, State.concatenate(parts).take(order.argsort())


def check_state(state: Any, template: Any, layer: str, device: torch.device, name: str = "state") -> None:
    """Raise ArgumentError unless a state has the structure of `template`, the layer's own state of zero streams.

    The first dimension of a tensor counts the streams. Any other dimension that is 0 in the template grows with the tokens.
    """
    if type(state) is not type(template):
        raise ArgumentError(name, f"is a {type(state).__name__}, but {layer} needs a {type(template).__name__}: {_ADVICE}.")
    for field in fields(template):
        part, own, named = getattr(state, field.name), getattr(template, field.name), f"{name}.{field.name}"
        if isinstance(own, State):
            check_state(part, own, layer, device, named)
        elif isinstance(own, Tensor):
            wanted = own.shape[1:]
            fits = part.dim() == own.dim() and all(b in (0, a) for a, b in zip(part.shape[1:], wanted, strict=True))
            if not fits:
                expected = ", ".join(["B", *(str(size) if size else "any" for size in wanted)])
                raise ArgumentError(named, f"has shape {list(part.shape)}, but {layer} needs [{expected}]: {_ADVICE}.")
            if part.dtype.is_floating_point != own.dtype.is_floating_point:
                raise ArgumentError(named, f"has dtype {part.dtype}, but {layer} needs {own.dtype}: {_ADVICE}.")
            if part.device != device:
                raise ArgumentError(name, f"is on {part.device}, but must be on {device}, like x.")
