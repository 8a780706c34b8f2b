"""The attention of a mixer taken apart: what each part reads, and what it adds to the tokens.

Attention is linear in the values. Values that tell tokens apart, a one for each, come out as the weights with which tokens are
read, by whatever way a part computes them; and what the parts add to a token sums up to what the mixer adds.

Shapes: B batch, T tokens, H heads, e = H w value width, d model width.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lineartime.errors import LineartimeError
from lineartime.layers.mixer import Mixer, State
from lineartime.layers.residual import zero_padding
from lineartime.layers.streams import ShiftedState
from lineartime.ops.layout import Layout

Part = Literal["attention", "local", "global"]
"""A part of an attention: what it reads near a token, what it reads of everything by a sum, or all, if it is one thing."""


class Opened(NamedTuple):
    """A mixer's attention over a batch, as functions of its values.

    Attributes:
        values: [B, T, e], those of the heads side by side.
        n_heads: H.
        parts: by their names, the linear functions whose sum is attention: values [B, T, H w] -> [B, T, H w], for any w.
        combine: the sum of the parts, [B, T, e] -> what the mixer adds to its input, [B, T, d].
    """

    values: Tensor
    n_heads: int
    parts: Mapping[Part, Callable[[Tensor], Tensor]]
    combine: Callable[[Tensor], Tensor]

    def weights(self, part: Part) -> Tensor:
        """What each token reads of each other one, [B, H, T, T]; row t holds what token t reads."""
        batch, length = self.values.shape[:2]
        each = torch.eye(length, dtype=self.values.dtype, device=self.values.device).repeat(1, self.n_heads)
        read = self.parts[part](each.expand(batch, -1, -1))
        weights: Tensor = read.unflatten(-1, (self.n_heads, length)).transpose(1, 2)
        return weights

    def contribution(self, part: Part) -> Tensor:
        """What a part adds to the tokens, [B, T, d]; the parts together add what the mixer adds without its output bias."""
        read = self.parts[part](self.values)
        return self.combine(read) - self.combine(torch.zeros_like(read))


class OpenMixer(Mixer[State]):
    """A mixer whose attention can be taken apart."""

    why_not_opened: ClassVar[str | None] = None
    """Why it cannot be, after all, as the end of a sentence; None for a mixer of which it can be."""
    parts: ClassVar[tuple[Part, ...]] = ("attention",)
    """What its attention is the sum of."""

    def open(self, x: Tensor, layout: Layout) -> Opened:
        """The attention of `read`, taken apart, for a layout that is no pack.

        Raises:
            LineartimeError: if this mixer cannot do that; it says why.
            ValueError: for a layout of another mixer.
        """
        if self.why_not_opened is not None:
            raise LineartimeError(f"{type(self).__name__} has no weights to show: {self.why_not_opened}.")
        self.check_layout(layout)
        return self.open_normed(self.normed(zero_padding(x, layout.mask), layout), layout)

    @abstractmethod
    def open_normed(self, normed: Tensor, layout: Layout) -> Opened:
        """The attention of `mix`, taken apart."""

    def global_state(self, state: State | ShiftedState) -> Tensor | None:
        """The part of a state of `extend` that sums up tokens which are not kept one by one, [B, ...]; None without one."""
        own = state.own if isinstance(state, ShiftedState) else state
        summary: Tensor | None = getattr(own, "summary", None)
        return None if summary is None or 0 in summary.shape[1:] else summary
