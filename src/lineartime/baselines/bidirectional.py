"""The base of mixers that can only be bidirectional: they cannot stream, and their errors give the reason."""

from typing import Any, NoReturn

from lineartime.layers.mixer import Mixer
from lineartime.layers.streams import StreamState


class BidirectionalMixer(Mixer[StreamState]):
    """Base of a layer that cannot be causal, before its other base: class L(BidirectionalMixer, MultiHeadMixer[StreamState]).

    The layer gives its reason in `why_not_causal`. `Mixer` shows it in the error for causal=True or for streaming.
    """

    def init_own_state(self, batch_size: int) -> NoReturn:
        """Raise ArgumentError: this mixer never streams."""
        self._refuse()

    def attend_next(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise ArgumentError: this mixer never streams."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        self.check_causal()
        raise AssertionError("check_causal refuses a mixer that cannot be causal")
