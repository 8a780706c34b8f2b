"""What the multi-head baselines share that cut their input into chunks.

Shapes: B batch, T tokens, d model width, H heads, h head width, C chunk size.
"""

import torch
from torch import Tensor

from lineartime.layers.checks import check_positive
from lineartime.layers.multi_head import MultiHeadMixer
from lineartime.layers.norms import Norm


class ChunkedHeads(MultiHeadMixer):
    """Multi-head attention by chunks, around an `attend` that a subclass supplies: [B, T, d] -> [B, T, d].

    Args:
        d_model: d, the width of inputs and outputs.
        n_heads: H, which must divide d.
        chunk_size: C; the length of the input need not be a multiple of it.
        causal: whether a token reads only itself and earlier tokens; needed to stream.
        norm: "layernorm", "scalenorm" or "rmsnorm".
        rope: whether queries and keys are rotated by their position.
        dropout: probability of dropping an output before the residual.

    Raises:
        ValueError: for an argument outside what it allows.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int = 12,
        chunk_size: int = 256,
        causal: bool = False,
        norm: Norm = "layernorm",
        rope: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, n_heads=n_heads, causal=causal, norm=norm, rope=rope, dropout=dropout)
        check_positive(chunk_size=chunk_size)
        self.chunk_size = chunk_size

    def empty_chunk(self, batch_size: int) -> Tensor:
        """Keys or values of an open chunk without tokens, [B, H, C, h]; ValueError unless the layer is causal."""
        none = self.empty_cache(batch_size, torch.promote_types(self.to_output.weight.dtype, torch.float32))
        return none.new_zeros(batch_size, self.n_heads, self.chunk_size, self.head_dim)
