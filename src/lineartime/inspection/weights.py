"""The attention weights of GAU, FLASH and softmax attention, from a layer's own projections.

Shapes: T tokens of one text, d model width, H heads, which are one in GAU and FLASH.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lineartime.layers.attention import Attention
from lineartime.layers.flash import FLASH
from lineartime.layers.gau import GAU
from lineartime.layers.mixer import Mixer
from lineartime.ops.activations import attention_weights
from lineartime.ops.batch import Batch
from lineartime.ops.mixed_chunk.memories import solved_queries
from lineartime.ops.modes import acc_dtype
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic.inputs import QuadraticOptions


def open_attention(mixer: Mixer, x: Tensor, prefix_lengths: Tensor | None = None) -> dict[str, Tensor]:
    """How much each token (row) reads each other one (column), [H, T, T], by the part of the attention.

    GAU and softmax attention have the part "attention"; FLASH has "local" and "global". Other mixers have none, and the result
    is empty. The sum of the parts times the values is what the layer gates or projects.

    Args:
        mixer: the layer.
        x: its input, one text, [1, T, d].
        prefix_lengths: int64 [1], how many of the first tokens read each other in both directions, or None.
    """
    batch = mixer.describe(x.shape, prefix_lengths=prefix_lengths, device=x.device)
    place = torch.arange(x.shape[1], device=x.device)
    in_prefix = place < (0 if prefix_lengths is None else prefix_lengths)
    visible = (place <= place[:, None]) | (in_prefix & in_prefix[:, None]) | (not mixer.causal)
    if type(mixer) is FLASH:
        return _of_flash(mixer, mixer.normed(x, batch), batch, visible, in_prefix)
    if type(mixer) is GAU:
        _, _, (q, k) = mixer.project(mixer.normed(x, batch), batch)
        options = QuadraticOptions(mixer.causal, mixer.activation, mixer.divisor())
        bias = mixer.bias_of_rows(len(place), None, batch)
        weights = attention_weights(
            q @ k.mT,
            d_qk=mixer.d_qk,
            visible=visible,
            bias=bias.dense() if isinstance(bias, FactoredBias) else bias,
            activation=mixer.activation,
            published_length=options.published_length(len(place), None),
        )
        return {"attention": weights}
    if type(mixer) is Attention:
        q, k, _ = mixer.project(mixer.normed(x, batch), batch)
        scores = (q @ k.mT)[0].to(acc_dtype(q)) * mixer.head_dim**-0.5
        return {"attention": scores.masked_fill(~visible, -torch.inf).softmax(-1)}
    return {}


def _of_flash(mixer: FLASH, normed: Tensor, batch: Batch, visible: Tensor, in_prefix: Tensor) -> dict[str, Tensor]:
    """The quadratic part reads a token's own chunk, the linear part the chunks before or, in both directions, all."""
    _, _, (q_quad, k_quad, q_lin, k_lin) = mixer.project(normed, batch)
    options, size, place = mixer.options, mixer.chunk_size, torch.arange(normed.shape[1], device=normed.device)
    chunk = place // size
    bias = None if mixer.bias is None else mixer.bias.consecutive(size, size, batch=batch)
    local = attention_weights(
        q_quad @ k_quad.mT,
        d_qk=mixer.d_qk,
        visible=visible & (chunk == chunk[:, None]),
        bias=None if bias is None else bias[place % size][:, place % size],
        activation=options.activation,
        published_length=options.published_length,
    )
    both_ways = in_prefix | (not options.causal)  # those tokens read their own chunk in the linear part, too
    reach = visible & ((chunk < chunk[:, None]) | both_ways[:, None])
    full = options.normalization == "paper"  # each chunk counts as full
    count = (reach[:, ::size].sum(-1) * size if full else reach.sum(-1)).to(local.dtype)
    divisor = torch.where(both_ways, replace(options, causal=False).linear_divisor(count), options.linear_divisor(count))
    if options.memory == "mesa":
        solved = solved_queries(q_lin, k_lin, batch, causal=options.causal)
        q_lin = batch.with_prefix(solved, lambda q, k, inner: solved_queries(q, k, inner, causal=False), q_lin, k_lin)
    return {"local": local, "global": (q_lin @ k_lin.mT).to(local.dtype) * reach / divisor[:, None]}
