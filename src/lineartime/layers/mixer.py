"""The base of a mixer, a layer that moves information between tokens: one verb reads rows, packs, prefixes and streams.

Shapes: B batch or streams, T tokens of a row, N real tokens, D documents, d model width.
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
from lineartime.ops.checks import as_mask, check_documents
from lineartime.ops.context import ContextGroup, sum_elsewhere
from lineartime.ops.modes import acc_dtype
from lineartime.ops.packing import Packing, describe
from lineartime.ops.state import State, renewed

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
    tokens: y, state = mixer.extend(x, state). Padding, packs, the norm, the token shift and the residual are done here. A
    subclass implements what is between them: `read` and, if it can be causal, `init_own_state`.

    Args:
        causal: whether a token attends only to itself and earlier tokens; required for streaming.
        token_shift: whether the first half of each normed token's features is taken from the previous token, with zeros for the
            first token of a document. The half is that of FLASH-pytorch (`shift_tokens`) and, for odd d, of `torch.chunk`.
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
    """Whether `read` takes streams at different positions and with padding; others get one such group after another."""
    rotated_width: int = 0
    """The number of features of a query or key of a head that are rotated, half of them in each half."""
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
        self.shifted_width = (d_model + 1) // 2 if token_shift else 0

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
    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        """Map normed tokens, [N, d], to what is added to the tokens, [N, d], and to the state of streams after them.

        Args:
            x: the real tokens of all documents, one after the other.
            packing: where they stand.
            state: of streams, what `init_own_state` or this method returned; it may be overwritten. None for whole sequences.
        """

    def init_own_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams, for `read`; only called for a causal mixer."""
        raise NotImplementedError

    def first_position(self, batch_size: int) -> Tensor:
        """The position of streams before their first token, int64 [B]."""
        return torch.zeros(batch_size, dtype=torch.long, device=self.any_parameter.device)

    def prepare(self, packing: Packing) -> None:
        """Make what layers share of a packing, which compiled blocks cannot keep: rotations and, by default, rows."""
        if not packing.even:
            packing.grids(None, causal=True)
        if self.rotated_width:
            packing.rotations(self.rotated_width, acc_dtype(self.any_parameter))

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        packing: Packing | None = None,
    ) -> Tensor:
        """Process whole sequences at once.

        Args:
            x: [B, T, d].
            mask: [B, T], bool or integers 0 and 1, True for real tokens. Padding may be anywhere; its outputs are zero.
            cu_seqlens: int [D + 1], the boundaries of D documents packed into a single row.
            prefix_lengths: int [B], or [D] with `cu_seqlens`, for a causal mixer: the number of real tokens at the start of
                each row, or document, that attend to each other bidirectionally. Later tokens attend causally.
            packing: inside a model, all of these in one, for the tokens x [N, d] that it has packed.

        Returns:
            [B, T, d], or [N, d].

        Raises:
            ArgumentError: if shapes do not match, or a sequence is longer than the mixer allows.
            LineartimeError: if prefixes are given and the mixer does not support them.
        """
        if packing is None:
            self.check_input(x)
            packing = self.describe(x.shape, mask, cu_seqlens, prefix_lengths, device=x.device)
            return packing.unpack(self.forward(packing.pack(x), packing=packing))
        normed, _ = self.shifted(self.before(x), packing, None)
        return self.after(x, self.read(normed, packing)[0])

    def describe(
        self,
        shape: tuple[int, ...],
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        *,
        device: torch.device,
        context: ContextGroup | None = None,
        one_grid: bool = False,
    ) -> Packing:
        """Check what describes the sequences of a batch [B, T, ...], and describe it; see `lineartime.ops.packing.describe`.

        Raises:
            ArgumentError: if `mask`, `cu_seqlens` or `prefix_lengths` do not match the batch, or this mixer cannot split
                sequences over the processes of a `context`.
            LineartimeError: if prefixes are given and this mixer does not support them.
        """
        if torch.jit.is_tracing():
            raise LineartimeError("A layer cannot be recorded by torch.jit.trace, for a single length: use torch.export.")
        if prefix_lengths is not None:
            self.check_prefix()
        for name, value in (("mask", mask), ("cu_seqlens", cu_seqlens), ("prefix_lengths", prefix_lengths)):
            if context is not None and value is not None:
                raise ArgumentError(
                    name,
                    "is given, but sequences that are split over processes can have neither padding, document boundaries nor "
                    f"prefixes: pass slices of whole sequences to every process, without {name}.",
                )
        if context is not None and not self.splits_context:
            raise ArgumentError(
                "context",
                f"is given, but {self.title} needs its whole sequence in one process: only FLASH can split sequences "
                "over several.",
            )
        mask = as_mask("mask", mask, shape[0], shape[1], device)
        lengths = check_documents(shape, cu_seqlens)
        return describe(
            shape, device=device, mask=mask, cu_seqlens=cu_seqlens, document_lengths=lengths, prefix=prefix_lengths,
            context=context, one_grid=one_grid,
        )  # fmt: skip

    def shifted(self, normed: Tensor, packing: Packing, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Take the first half of the features from the token before, if the token shift is on.

        `last` is what streams keep for it, [D, h]; it is returned for the tokens after these.
        """
        if not self.token_shift:
            return normed, last
        width = self.shifted_width
        first, recent = normed[:, :width], None if last is None else last[:, None]
        if packing.context is not None:  # this slice continues that of the previous process, like a stream
            ends = first.view(packing.shape[0], -1, width)[:, -1:].sum(1)  # zeros for a slice without tokens
            recent = sum_elsewhere(ends, packing.context, "just before")[:, None]
        (before,), after = packing.earlier(first, 1, recent)
        shifted = torch.cat([before, normed[:, width:]], 1)
        if last is None or after is None:
            return shifted, None
        return shifted, renewed(last, after[:, 0], packing)

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
        return ShiftedState(torch.zeros(batch_size, self.shifted_width, dtype=like.dtype, device=like.device), own)

    def extend(
        self, x: Tensor, state: Any = None, mask: Tensor | None = None, *, packing: Packing | None = None
    ) -> tuple[Tensor, Any]:
        """Continue streams, at any positions, by N tokens; each has the same outputs as if it were continued alone.

        Args:
            x: [B, N, d].
            state: the state that `extend` returned, or None to begin B streams. It is consumed: its memory may be overwritten,
                so that `state.clone()` must be made before to continue it in another way, too.
            mask: [B, N], bool or integers 0 and 1, True for real tokens. Positions count only real tokens, so prompts of
                different lengths can be padded on the left, read in one call and continued without a mask.
            packing: inside a model, where the tokens x [N, d] stand, which it has packed.

        Returns:
            [B, N, d], with zeros at padding, or [N, d], and the new state.

        Raises:
            ArgumentError: if the mixer is not causal, shapes do not match, or the state has another batch size or layer.
        """
        if packing is None:
            self.check_causal()
            self.check_input(x)
            mask = as_mask("mask", mask, x.shape[0], x.shape[1], x.device)
            state = self.init_state(x.shape[0]) if state is None else state
            self.check_state(state, x)
            packing = describe(x.shape, device=x.device, mask=mask, position=state.position)
            y, state = self.extend(packing.pack(x), state, packing=packing)
            return packing.unpack(y), state
        last = state.last if isinstance(state, ShiftedState) else None
        own = state.own if isinstance(state, ShiftedState) else state
        normed, last = self.shifted(self.before(x), packing, last)
        if self.any_positions or (packing.even and packing.common_start is not None):
            out, own = self.read(normed, packing, own)
        else:
            out, own = by_position(self.read, normed, own, packing)
        return self.after(x, out), own if last is None else ShiftedState(last, own)

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
        check_state(state, self.init_state(0), type(self).__name__, x.device)
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
    read: Callable[[Tensor, Packing, Any], tuple[Tensor, Any]], x: Tensor, state: Any, packing: Packing
) -> tuple[Tensor, Any]:
    """Continue streams in groups that stand at one position and get the same number of tokens: [N, d] -> [N, d]."""
    positions = zip(state.position.tolist(), packing.new.tolist(), strict=True)
    groups: dict[tuple[int, int], list[int]] = {}
    for row, group in enumerate(positions):
        groups.setdefault(group, []).append(row)
    rows, parts = packing.to_rows(x), []
    out = torch.zeros_like(rows)
    for (position, count), chosen in groups.items():
        index = torch.tensor(chosen, device=x.device)
        own = state.take(index)
        if count:
            here = describe((len(chosen), count), device=x.device, position=own.position)
            here = replace(here, starts=[position] * len(chosen), lengths=[count] * len(chosen))  # also on a GPU
            y, own = read(rows[index, :count].flatten(0, 1), here, own)
            out = out.to(y.dtype).index_put((index[:, None], torch.arange(count, device=x.device)), y.unflatten(0, (-1, count)))
        parts.append(own)
    if not parts:
        return x, state
    order = torch.tensor([row for rows in groups.values() for row in rows], device=x.device)
    return packing.tokens(out), State.concatenate(parts).take(order.argsort())


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
