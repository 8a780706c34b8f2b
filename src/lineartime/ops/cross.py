"""Cross-attention of gated units: queries from one sequence, keys and values from another.

Shapes: B batch, T query tokens, S tokens of the source, s query/key width, e value width; "..." may be heads, or nothing.
Source: the attention of "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2, relu(q.k / sqrt(s))^2 / n,
applied across two sequences. The paper leaves n open; here it is the number of real tokens of the source.
"""

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, check_choice
from lineartime.ops.activations import Activation, known_activations
from lineartime.ops.checks import as_mask
from lineartime.ops.mixed_chunk import Scales, attention_weights, reciprocal
from lineartime.ops.modes import matmul_dtype, output_dtype, without_autocast


def cross_attention(
    q: Tensor, k: Tensor, v: Tensor, *, source_mask: Tensor | None = None, activation: Activation = "relu2"
) -> Tensor:
    """Attend from every token of one sequence to every real token of another, by default without softmax.

    Args:
        q: [B, ..., T, s] queries.
        k: [B, ..., S, s] keys.
        v: [B, ..., S, e] values.
        source_mask: [B, S], bool or integers 0 and 1, True for real tokens of the source. No query attends to padding.
        activation: the activation of the scores: "relu2" or "softmax".

    Returns:
        [B, ..., T, e], with zeros for rows whose source has no real token. float16 is computed in float32.

    Raises:
        ArgumentError: if shapes do not match, or the activation is unknown.
    """
    source_mask = _check(q, k, v, source_mask, activation)
    hidden, count = None, torch.full((1,), k.shape[-2], device=k.device)
    if source_mask is not None:
        real = source_mask.view(source_mask.shape[0], *[1] * (k.dim() - 3), source_mask.shape[1])
        k, v = (x.masked_fill(~real[..., None], 0.0) for x in (k, v))  # 0 * inf, at padding, would be NaN
        hidden, count = ~real[..., None, :], real.sum(-1, keepdim=True)
    compute, scales = matmul_dtype(q, k, v), Scales(q.shape[-1] ** -0.5, reciprocal, reciprocal)
    with without_autocast(q):
        products = q.to(compute) @ k.to(compute).mT
        weights = attention_weights(products, hidden, count.clamp(min=1), None, activation, scales)
        return (weights.to(compute) @ v.to(compute)).to(output_dtype(v, compute))


def _check(q: Tensor, k: Tensor, v: Tensor, source_mask: Tensor | None, activation: str) -> Tensor | None:
    """Check the arguments, and return the mask as bool."""
    check_choice("activation", activation, known_activations())
    if q.dim() < 3:
        raise ArgumentError("q", f"has shape {list(q.shape)}, but must be [B, ..., T, s].")
    if v.dim() != q.dim() or v.shape[:-2] != q.shape[:-2]:
        expected = ", ".join([*map(str, q.shape[:-2]), "S", "e"])
        raise ArgumentError(
            "v", f"has shape {list(v.shape)}, but must be [B, ..., S, e] = [{expected}] to match q of shape {list(q.shape)}."
        )
    if k.shape != (*v.shape[:-1], q.shape[-1]):
        expected = ", ".join(map(str, [*v.shape[:-1], q.shape[-1]]))
        raise ArgumentError(
            "k",
            f"has shape {list(k.shape)}, but must be [B, ..., S, s] = [{expected}] to match q of shape {list(q.shape)} "
            f"and v of shape {list(v.shape)}.",
        )
    return as_mask("source_mask", source_mask, v.shape[0], v.shape[-2], v.device)
