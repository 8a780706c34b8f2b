"""Mixers that can attend bidirectionally within the first tokens of a sequence, and causally after them.

Shapes: B batch, N tokens of a prefix, d model width.
"""

from torch import Tensor

from lineartime.layers.mixer import Mixer, State
from lineartime.layers.streams import RaggedState, ShiftedState, extend_ragged
from lineartime.ops.checks import as_mask


class PrefixMixer(Mixer[State]):
    """A mixer that takes `prefix_lengths`, if it is causal, and begins streams with a prefix."""

    reads_prefix = True

    def read_prefix(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, State | ShiftedState | RaggedState]:
        """Begin streams with tokens that attend to each other bidirectionally; `extend` continues them causally.

        The outputs are those of `forward` with these tokens as prefixes. The state is the one that `extend` returns for them.

        Args:
            x: [B, N, d].
            mask: [B, N], bool or integers 0 and 1, True for real tokens. Prefixes of different lengths are padded on the left.

        Returns:
            [B, N, d], with zeros at padding, and the state: a `RaggedState` if prefixes have different lengths.

        Raises:
            LineartimeError: if the mixer is not causal or does not support prefixes, or shapes do not match.
        """
        self.check_prefix()
        self.check_input(x)
        mask = as_mask("mask", mask, x.shape[0], x.shape[1], x.device)

        def begin(x: Tensor, state: State | ShiftedState) -> tuple[Tensor, State | ShiftedState]:
            return self._extend_with_layout(x, state, self.prefix_layout(x.shape, x.device))

        return extend_ragged(begin, x, self._init_state(x.shape[0]), mask)
