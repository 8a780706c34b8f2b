"""Base of the multi-head baselines that cut their input into chunks.

Shapes: B batch, T tokens, d model width, H heads, h head width, C chunk size.
"""

from torch import Tensor
from typing_extensions import Unpack

from lineartime.layers.multi_head import HeadOptions, MultiHeadMixer
from lineartime.ops.checks import check_positive
from lineartime.ops.precision import acc_dtype


class ChunkedHeadOptions(HeadOptions, total=False):
    """What every multi-head attention by chunks takes: see `ChunkedHeads`."""

    chunk_size: int


class ChunkedHeads(MultiHeadMixer):
    """Multi-head attention by chunks, around an `attend` that a subclass supplies: [B, T, d] -> [B, T, d].

    Args:
        chunk_size: C; the length of the input need not be a multiple of it.
        **options: the options of `MultiHeadMixer`.
    """

    def __init__(self, d_model: int, *, chunk_size: int = 256, **options: Unpack[HeadOptions]) -> None:
        super().__init__(d_model, **options)
        check_positive(chunk_size=chunk_size)
        self.chunk_size = chunk_size

    def empty_chunk(self, batch_size: int) -> Tensor:
        """Keys or values of an open chunk without tokens, [B, H, C, h]."""
        none = self.empty_cache(batch_size, acc_dtype(self.any_parameter))
        return none.new_zeros(batch_size, self.n_heads, self.chunk_size, self.head_dim)
