"""What mixers share that can only look both ways: they have no stream, and say why."""

from typing import Any, NoReturn

from lineartime.layers.mixer import Mixer
from lineartime.layers.streams import StreamState


class BidirectionalMixer(Mixer[StreamState]):
    """Base of a layer that cannot be causal, before its other base: class L(BidirectionalMixer, MultiHeadMixer[StreamState]).

    The layer states its reason, `why_not_causal`; `Mixer` shows it to whoever asks for causal=True, or for a stream.
    """

    def init_own_state(self, batch_size: int) -> NoReturn:
        """Raise ValueError: this mixer never streams."""
        self._refuse()

    def attend_next(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Raise ValueError: this mixer never streams."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        self.check_causal()
        raise AssertionError("check_causal refuses a mixer that cannot be causal")
