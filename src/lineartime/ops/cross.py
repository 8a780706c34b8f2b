"""Cross-attention of gated units: queries from one sequence, keys and values from another.

Shapes: B batch, T query tokens, S tokens of the source, s query/key width, e value width; "..." may be heads, or nothing.
Source: the attention of "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2, relu(q.k / sqrt(s))^2 / n,
applied across two sequences. The paper leaves n open; here it is the number of real tokens of the source.
"""

import torch
from torch import Tensor

from lineartime.errors import ArgumentError, check_choice
from lineartime.ops.activations import Activation, attention_weights_oracle, known_activations
from lineartime.ops.checks import as_mask
from lineartime.ops.quadratic.blocked import attend_visible


def cross_attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, source_mask: Tensor | None = None, activation: Activation = "relu2"
) -> Tensor:
    """The definition of `cross_attention`, one query at a time: slow, a reference for tests."""
    if q.dim() > 3:
        heads = [
            cross_attention_oracle(q[:, h], k[:, h], v[:, h], source_mask=source_mask, activation=activation)
            for h in range(q.shape[1])
        ]
        return torch.stack(heads, 1)
    out = v.new_zeros(*q.shape[:2], v.shape[-1])
    for b in range(q.shape[0]):
        real = [j for j in range(k.shape[1]) if source_mask is None or source_mask[b, j]]
        for t in range(q.shape[1] if real else 0):
            weights = attention_weights_oracle(
                k[b, real] @ q[b, t], None, d_qk=q.shape[-1], activation=activation, published_length=None
            )
            out = out.index_put((torch.tensor(b), torch.tensor(t)), weights @ v[b, real])
    return out


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
    visible: Tensor | None = None
    if source_mask is not None:
        real = source_mask.view(source_mask.shape[0], *[1] * (k.dim() - 3), source_mask.shape[1])
        k, v = (x.masked_fill(~real[..., None], 0.0) for x in (k, v))  # 0 * inf, at padding, would be NaN
        visible = real[..., None, :]
    return attend_visible(q, k, v, visible=visible, activation=activation, published_length=None)


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
