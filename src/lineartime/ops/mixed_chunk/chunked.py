"""Mixed chunk attention by chunks, in plain PyTorch on any device: time linear in T.

Shapes: B batch, T tokens, G chunks, C chunk size, s query/key width, e value width.
The definition is in reference.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.batch import Batch, Reach, sum_chunks
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions
from lineartime.ops.modes import acc_dtype, is_exporting, matmul_dtype, output_dtype, without_autocast
from lineartime.ops.quadratic.blocked import attend_visible


def attend(heads: Heads, bias: Tensor | None, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """Attend quadratically inside chunks and linearly across them: [B, T, e]."""
    compute = matmul_dtype(*heads)
    with without_autocast(heads.v):
        q_quad, k_quad, q_lin, k_lin, v = (batch.cut(x.to(compute)) for x in heads)
        out = chunk_attention(q_quad, k_quad, v, batch, bias, options)
        reach: Reach = "before" if options.causal else "all"
        elsewhere = batch.elsewhere(options.causal)
        out = out + summary_attention(q_lin, k_lin, v, batch, options, reach=reach, elsewhere=elsewhere)
        return batch.join(out.to(output_dtype(heads.v, compute)))


def chunk_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, bias: Tensor | None, options: MixedChunkOptions) -> Tensor:
    """The quadratic part, inside each chunk: [B, G, C, s], [B, G, C, s], [B, G, C, e] -> [B, G, C, e]."""
    causal = options.causal
    visible = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril() if causal else None
    if batch.real is not None and visible is None:
        visible = batch.real[..., None, :]  # causal needs only the triangle: empty slots come after real ones
    return attend_visible(
        q, k, v, visible=visible, bias=bias, activation=options.activation, published_length=options.published_length
    )


def summary_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, options: MixedChunkOptions, *, reach: Reach, elsewhere: int = 0
) -> Tensor:
    """The linear part: every chunk uses the sum of k v^T over the chunks in its reach; shapes as for `chunk_attention`.

    `elsewhere` is the number of tokens that other processes add to the sum. The divisor includes them.
    """
    size = batch.sizes(v.new_empty(0, dtype=acc_dtype(v)))[..., None, None]
    if options.normalization == "paper":
        size = (size > 0) * float(options.chunk_size)  # a chunk counts as full, an empty chunk as zero
    alone = reach == "before" and batch.chunk_document is None and not is_exporting()
    if alone:  # the first chunk reads nothing, and the last is not read
        q, k, v, size = q[:, 1:], k[:, :-1], v[:, :-1], size[:, :-1]
    summaries = (k.mT @ v).to(acc_dtype(v))  # [B, G, s, e]
    total, count = (x.cumsum(1) if alone else sum_chunks(x, batch, reach) for x in (summaries, size))
    read = q @ (total / options.linear_divisor(count + elsewhere)).to(q.dtype)
    return F.pad(read, (0, 0, 0, 0, 1, 0)) if alone else read
