"""Base of the mixers that cannot be causal, and so cannot stream."""

from typing import Any, NoReturn

from lineartime.layers.residual import Mixer


class BidirectionalMixer(Mixer):
    """Base of a layer that cannot be causal, named before its other base: class L(BidirectionalMixer, MultiHeadMixer).

    The layer's class states the reason, `why_not_causal`; the error for causal=True contains it.
    """

    def check_causal(self) -> NoReturn:
        """Raise ValueError: this mixer cannot stream."""
        raise ValueError(
            f"{type(self).__name__} has causal=False and cannot stream, nor can it be built with causal=True: "
            f"{self.why_not_causal}."
        )

    def init_state(self, batch_size: int) -> Any:
        """Raise ValueError: this mixer cannot stream."""
        self.check_causal()

    def attend_next(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: this mixer cannot stream. `extend` raises it first."""
        self.check_causal()
