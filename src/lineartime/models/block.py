"""A block of a model: a mixer and an optional feed-forward layer.

Shapes: B batch, T tokens, N new tokens of a stream, d model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lineartime.errors import Argument, ArgumentError
from lineartime.layers.mixer import Mixer
from lineartime.models.config import ModelConfig
from lineartime.ops.batch import Batch


class Block(nn.Module):
    """A mixer and an optional feed-forward layer. Each contains its own norm and residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        options = config.layer_options
        reason = config.mixer.layer.why_not_causal
        if config.task != "mlm" and reason is not None:
            problem = f"is {config.task!r}, but a model of {config.mixer.kind} cannot be causal: {reason}; use "
            raise ArgumentError("task", problem, Argument("task", "mlm"), ".")
        self.mixer: Mixer = config.mixer.build(config.d_model, causal=config.task != "mlm", **options)
        if config.task == "prefix-lm":
            self.mixer.check_prefix()
        self.feed_forward: nn.Module = nn.Identity()
        if config.feed_forward is not None:
            self.feed_forward = config.feed_forward.build(config.d_model, **options)

    def forward(self, x: Tensor, batch: Batch, recompute: bool = False) -> Tensor:
        """Map the tokens of a batch, [B, T, d] or a pack, to the same shape.

        With `recompute`, only x is kept, and the backward pass recomputes the block.
        """
        if recompute and torch.is_grad_enabled():
            recomputed: Tensor = checkpoint(self._forward, x, batch, use_reentrant=False)
            return recomputed
        return self._forward(x, batch)

    def _forward(self, x: Tensor, batch: Batch) -> Tensor:
        out: Tensor = self.feed_forward(self.mixer(x, batch=batch))
        return out

    def extend(self, x: Tensor, state: Any, batch: Batch) -> tuple[Tensor, Any]:
        """Continue streams by N tokens: [B, N, d] -> [B, N, d], and the mixer's state after them."""
        x, state = self.mixer.extend(x, state, batch=batch)
        return self.feed_forward(x), state
