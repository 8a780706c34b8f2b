"""The layout of a batch: where its real tokens are, and what a mixer needs to know of it. make_layout.py makes it.

Shapes: B batch, T tokens, D documents, R rows, L slots of a row, C chunk size, f features.
A document is a row of the batch or, with `cu_seqlens`, one of the sequences packed into a single row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.activations import Normalization
from lineartime.ops.chunks import Chunks, OpenChunk, Slots
from lineartime.ops.context import ContextGroup


class Parts(NamedTuple):
    """A pack whose documents differ much in length, split into smaller packs of documents of similar length.

    Attributes:
        tokens: int64 [T], the places of the tokens, one part after the other.
        layouts: the layouts of the parts.
    """

    tokens: Tensor
    layouts: "tuple[Layout, ...]"

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each part."""
        return [layout.positions.shape[-1] for layout in self.layouts]


class Layout(NamedTuple):
    """What every layer needs to know about a batch.

    Attributes:
        mask: bool [B, T], True for real tokens; None where all are.
        positions: int64 [T] or [B, T], the position of each token in its document, counting only real tokens.
        document: int64 [T], the document of each token; None if every row is one document.
        document_starts: int64 [D + 1], the boundaries of the documents; None if every row is one document.
        previous: int64 [B or 1, T], for a token shift: the place of the token before each one in its document, T if there is
            none. None if every row is one document without padding, or for a mixer without a token shift.
        rotations: [2, T, f] or [2, B, T, f], the cosines and sines of rotary positions; None for a mixer without them.
        chunk_rotations: [2, B or 1, G, C, f], the same, cut into chunks; None without chunks.
        place_rotations: [2, n, f], the same for the n places of a row or chunk, for a rotary bias; None without one.
        rows: each document as a row; None if the rows of the batch are whole documents without padding, or for a mixer with
            chunks.
        chunks: the documents cut into chunks; None for a mixer over whole rows.
        context: the processes over which every sequence is split; None if this process holds whole sequences.
        prefix: the layout of the prefixes alone, whose mask is True for their tokens (None if all tokens are in a prefix); None
            for a batch without prefixes.
        open_chunk: the place of the next token of each stream in its chunk, for a step of a mixer with chunks; None otherwise.
        parts: a pack split into smaller ones, which are computed separately (`by_part`) and have their own rotations, rows,
            chunks and prefixes; None for anything else.
        plan: the plan that it was made for; a mixer with another plan cannot use it.
    """

    mask: Tensor | None
    positions: Tensor
    document: Tensor | None = None
    document_starts: Tensor | None = None
    previous: Tensor | None = None
    rotations: Tensor | None = None
    chunk_rotations: Tensor | None = None
    place_rotations: Tensor | None = None
    rows: Slots | None = None
    chunks: Chunks | None = None
    context: ContextGroup | None = None
    prefix: "Layout | None" = None
    open_chunk: OpenChunk | None = None
    parts: Parts | None = None
    plan: "LayoutPlan | None" = None

    def by_part(self, read: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        """Apply a function that mixes tokens to each part of a pack, or to the whole batch: [B, T, ...] each -> [B, T, e].

        `read` receives the tensors of some tokens, with None for None, and the layout of these tokens.
        """
        if self.parts is None:
            return read(*tensors, self)
        tokens, layouts = self.parts
        nothing = [None] * len(layouts)
        cut = (nothing if x is None else x.index_select(1, tokens).split(self.parts.sizes, 1) for x in tensors)
        out = torch.cat([read(*part, layout) for *part, layout in zip(*cut, layouts, strict=True)], 1)
        return torch.empty_like(out).index_copy(1, tokens, out)

    def with_prefix(self, causal: Tensor, attend: "Callable[[Layout], Tensor]") -> Tensor:
        """Let every prefix token attend to its whole prefix.

        Args:
            causal: the outputs of a causal attention over everything, [B, T, e].
            attend: the same attention, bidirectional, over the tokens of a layout. It is called with that of the prefixes.

        Returns:
            [B, T, e], the outputs of `attend` at the tokens of prefixes, and the causal ones at all others.
        """
        if self.prefix is None:
            return causal
        bidirectional, mask = attend(self.prefix), self.prefix.mask
        return bidirectional if mask is None else torch.where(mask[..., None], bidirectional, causal)

    def by_row(self, attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Apply an attention to every document as a separate row: [B, T, f] each -> [B, T, e].

        `attend` maps [R, L, f] each, and `real`, bool [R, L] or None if there is no padding, to [R, L, e].
        """
        if self.rows is None:
            return attend(*tensors, None)
        out = attend(*(self.rows.arrange(x).flatten(0, 1) for x in tensors), self.rows.real.flatten(0, 1))
        return self.rows.restore(out.view(*self.rows.real.shape, out.shape[-1]))

    def misfit(self, batch_size: int, length: int) -> str | None:
        """The batch that it was made for, in words, if that differs from [batch_size, length]; otherwise None."""
        if self.positions.shape[-1] != length:
            return f"{self.positions.shape[-1]} tokens"
        real = self.mask if self.chunks is None or self.mask is not None else self.chunks.real
        rows = 1 if self.document is not None else batch_size if real is None else real.shape[0]
        return None if rows == batch_size else f"{rows} rows"

    def require_chunks(self) -> Chunks:
        """The chunks; ArgumentError for a layout that was planned without a chunk size."""
        if self.chunks is None:
            raise ArgumentError("layout", "has no chunks: make it with a plan that has a chunk_size.")
        return self.chunks

    def require_open_chunk(self) -> OpenChunk:
        """The open chunk of each stream; ArgumentError for a layout that is not that of a step."""
        if self.open_chunk is None:
            raise ArgumentError("layout", "has no open chunk: make it with step_layout of a mixer with chunks.")
        return self.open_chunk

    def elsewhere(self, causal: bool) -> int:
        """The number of tokens in other processes of the context that a token attends to."""
        if self.context is None:
            return 0
        return self.positions.shape[-1] * (self.context.rank if causal else self.context.size - 1)


class LayoutPlan(NamedTuple):
    """What a mixer needs from a layout.

    Attributes:
        rotary_width: s, the width of the vectors that are rotated; None for no rotation.
        rotary_features: the number of their features that are rotated; None for all.
        bias_width: the width of the vectors of a rotary relative bias; None without one.
        bias_places: the number of places that such a bias spans; None for the length of a row.
        chunk_size: C of a mixer with chunks; None for a mixer over whole rows.
        normalization: how a mixer with chunks divides scores and sums, for its steps; None for others.
        max_length: the maximum number of tokens in a row; None for no limit.
        token_shift: whether tokens take half of their features from the previous token.
        dtype: the dtype of the rotations.
    """

    rotary_width: int | None = None
    rotary_features: int | None = None
    bias_width: int | None = None
    bias_places: int | None = None
    chunk_size: int | None = None
    normalization: Normalization | None = None
    max_length: int | None = None
    token_shift: bool = False
    dtype: torch.dtype = torch.float32


NO_PLAN = LayoutPlan()
