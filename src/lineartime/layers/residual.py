"""The bases of all layers: a norm before the layer, a residual around it, and the contract of a mixer.

Shapes: B batch, T tokens, d model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lineartime.errors import ArgumentError
from lineartime.layers.checks import check_positive
from lineartime.layers.norms import Norm, build_norm
from lineartime.ops.context_parallel import ContextGroup
from lineartime.ops.layout import check_tokens


class LayerOptions(TypedDict, total=False):
    """What every layer takes: see `ResidualLayer`."""

    norm: Norm
    dropout: float


class MixerOptions(LayerOptions, total=False):
    """What every mixer takes: see `Mixer`."""

    causal: bool


class ResidualLayer(nn.Module):
    """Base of all layers: y = x + dropout(f(norm(x))); a subclass supplies f.

    Args:
        d_model: d, the width of inputs and outputs.
        norm: "layernorm", "scalenorm" or "rmsnorm".
        dropout: probability of dropping an output before the residual.

    Raises:
        ValueError: for an argument outside what it allows.
    """

    name: ClassVar[str]
    """Its name in a `LayerConfig`, in JSON and in the documents: that of its file, with hyphens."""

    def __init__(self, d_model: int, *, norm: Norm = "layernorm", dropout: float = 0.0) -> None:
        super().__init__()
        check_positive(d_model=d_model)
        if not 0 <= dropout < 1:
            raise ArgumentError("dropout", f"is {dropout}, but must be at least 0 and below 1.")
        self.d_model = d_model
        self.norm = build_norm(norm, d_model)
        self.dropout = nn.Dropout(dropout)

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError unless x is [B, T, d]."""
        if x.dim() != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x has shape {list(x.shape)}, but must be [B, T, d_model] with d_model = {self.d_model}.")


class Mixer(ResidualLayer, ABC):
    """Base of the layers that move information between tokens: the contract they share.

    y = mixer(x, mask=None, cu_seqlens=None) is parallel over T. A causal mixer also streams: state = mixer.init_state(batch),
    then y, state = mixer.extend(x, state) for any number of new tokens.

    Args:
        causal: whether a token reads only itself and earlier tokens; needed to stream.
        **options: those of `ResidualLayer`.
    """

    why_not_causal: ClassVar[str | None] = None
    """Why a bidirectional mixer cannot be causal, as the end of a sentence; None for a mixer that can be."""
    splits_context: ClassVar[bool] = False
    """Whether it can read sequences that several processes hold together."""
    context: ContextGroup | None = None
    """The processes that hold every sequence together, if they do: see `lineartime.models.set_context_parallel`."""

    def __init__(self, d_model: int, *, causal: bool = False, **options: Unpack[LayerOptions]) -> None:
        super().__init__(d_model, **options)
        if causal and self.why_not_causal is not None:
            raise ArgumentError("causal", f"is True, but {type(self).__name__} must have causal=False: {self.why_not_causal}.")
        self.causal = causal

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens that the mixer can read, or None where there is no limit."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Read whole sequences at once: [B, T, d] -> [B, T, d]."""

    @abstractmethod
    def init_state(self, batch_size: int) -> Any:
        """The state before the first token of `batch_size` streams; ValueError unless the mixer is causal.

        A NamedTuple with a `position`, whose first field is a tensor [B, ...].
        """

    @abstractmethod
    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Continue streams by N tokens, [B, N, d] -> [B, N, d] and the state after them; `state` stays as it is."""

    def join_streams(self, states: Sequence[Any]) -> Any:
        """Bring streams that stand at different positions together, to continue them token by token with `step`.

        Args:
            states: of one or more streams each, as `extend` returns them; they stay as they are.

        Returns:
            A NamedTuple of tensors, the last of which is `position`, int [B].

        Raises:
            ValueError: if this mixer cannot do that.
        """
        raise ValueError(
            f"{type(self).__name__} continues streams at one position only: generate from one prompt at a time, or use FLASH."
        )

    def step(self, x: Tensor, streams: Any) -> Tensor:
        """Continue joined streams by one token, [B, 1, d] -> [B, 1, d]; `streams` is brought up to date in place."""
        raise NotImplementedError  # `join_streams` has said why

    def check_batch(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
        """Raise ValueError unless x is [B, T, d] and the mask and the document boundaries fit it."""
        self.check_input(x)
        check_tokens(x.shape, mask, cu_seqlens)

    def check_stream(self, x: Tensor, state: Any) -> None:
        """Raise ValueError unless this mixer streams and x has the batch size that the state was made for."""
        self.check_causal()
        self.check_input(x)
        made_for = state[0].shape[0]
        if x.shape[0] != made_for:
            raise ValueError(
                f"x has batch size {x.shape[0]}, but its state was made for {made_for}: call init_state({x.shape[0]})."
            )

    def check_causal(self) -> None:
        """Raise ValueError unless this mixer is causal, and so can stream."""
        if not self.causal:
            raise ValueError(f"{type(self).__name__} has causal=False and cannot stream: build it with causal=True.")


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T, d] with zeros wherever the mask says padding, whatever stood there."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def init_dense(linear: nn.Linear) -> nn.Linear:
    """The same linear map with weights drawn from N(0, 0.02) and biases 0 (arXiv 2202.10447, appendix B)."""
    nn.init.normal_(linear.weight, std=0.02)
    nn.init.zeros_(linear.bias)
    return linear


def new_positions(start: int, count: int, device: torch.device) -> Tensor:
    """The positions start, ..., start + count - 1 of a stream's new tokens."""
    return torch.arange(start, start + count, device=device)
