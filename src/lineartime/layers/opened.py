"""The attention of a mixer, split into parts: the attention weights of each part, and what it adds to the tokens.

Attention is linear in the values. If the values are one-hot vectors, one for each token, the output of a part is its attention
weights, however the part computes them. What the parts add to a token sums to what the mixer adds.

Shapes: B batch, T tokens, H heads, e = H w value width, d model width.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers.mixer import Mixer, State
from lineartime.layers.residual import zero_padding
from lineartime.layers.streams import ShiftedState
from lineartime.ops.layout import Layout

Part = Literal["attention", "local", "global"]
"""A part of an attention: "local" for nearby tokens, "global" for a sum over all tokens, "attention" if there is one part."""


class Opened(NamedTuple):
    """A mixer's attention over a batch, as functions of its values.

    Attributes:
        values: [B, T, e], with the heads concatenated.
        n_heads: H.
        parts: by name, the linear functions whose sum is the attention: values [B, T, H w] -> [B, T, H w], for any w.
        combine: maps the sum of the parts, [B, T, e], to what the mixer adds to its input, [B, T, d].
    """

    values: Tensor
    n_heads: int
    parts: Mapping[Part, Callable[[Tensor], Tensor]]
    combine: Callable[[Tensor], Tensor]

    def weights(self, part: Part) -> Tensor:
        """The attention weights of a part, [B, H, T, T]; row t holds the weights of query t."""
        batch, length = self.values.shape[:2]
        each = torch.eye(length, dtype=self.values.dtype, device=self.values.device).repeat(1, self.n_heads)
        read = self.parts[part](each.expand(batch, -1, -1))
        weights: Tensor = read.unflatten(-1, (self.n_heads, length)).transpose(1, 2)
        return weights

    def contribution(self, part: Part) -> Tensor:
        """What a part adds to the tokens, [B, T, d]; the sum over the parts is what the mixer adds, without its output bias."""
        read = self.parts[part](self.values)
        return self.combine(read) - self.combine(torch.zeros_like(read))


class OpenMixer(Mixer[State]):
    """A mixer whose attention can be taken apart."""

    why_not_opened: ClassVar[str | None] = None
    """Why the attention cannot be split, as the end of a sentence; None if it can be."""
    parts: ClassVar[tuple[Part, ...]] = ("attention",)
    """The parts whose sum is its attention."""

    def open(self, x: Tensor, layout: Layout) -> Opened:
        """The attention of `forward_with_layout`, split into its parts, for a layout without packed documents.

        Raises:
            LineartimeError: if the attention cannot be split; the message gives the reason.
            ArgumentError: if x does not match the mixer, or the layout belongs to another mixer or holds packed documents.
        """
        if self.why_not_opened is not None:
            raise LineartimeError(f"{type(self).__name__} cannot show attention weights: {self.why_not_opened}.")
        self.check_input(x)
        self.check_layout(layout, x)
        if layout.document is not None:
            raise ArgumentError("layout", "holds packed documents, but must not: open them one by one, or as rows with a mask.")
        return self.open_normed(self.normed(zero_padding(x, layout.mask), layout), layout)

    @abstractmethod
    def open_normed(self, normed: Tensor, layout: Layout) -> Opened:
        """The attention of `mix`, split into its parts."""

    def global_state(self, state: State | ShiftedState) -> Tensor | None:
        """The part of a state of `extend` that summarises tokens that are not stored one by one, [B, ...]; None without one."""
        own = state.own if isinstance(state, ShiftedState) else state
        summary: Tensor | None = getattr(own, "summary", None)
        return None if summary is None or 0 in summary.shape[1:] else summary
