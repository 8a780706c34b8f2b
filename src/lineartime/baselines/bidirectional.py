"""What mixers share that can only look both ways: they have nothing to stream, and say why."""

from typing import Any, NoReturn

from lineartime.layers.residual import Mixer


class BidirectionalMixer(Mixer):
    """Mixed into a layer that cannot be causal, before its other base: class L(BidirectionalMixer, MultiHeadMixer).

    The layer states its reason, `why_not_causal`, which `Mixer` shows to whoever asks for causal=True.
    """

    def check_causal(self) -> NoReturn:
        """Raise ValueError, for this mixer never streams."""
        raise ValueError(
            f"{type(self).__name__} has causal=False and cannot stream, nor can it be built with causal=True: "
            f"{self.why_not_causal}."
        )

    def init_state(self, batch_size: int) -> Any:
        """Raise ValueError, for this mixer never streams."""
        self.check_causal()

    def attend_next(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError, for this mixer never streams; `extend` has refused before."""
        self.check_causal()
