"""Quadratic attention by its definition, one query at a time: slow, a reference for the other forms.

    out[t] = sum over visible j of relu(q[t].k[j] / sqrt(s) + bias[t, j])^2 v[j]  /  n        n: the number of visible keys

A key j is visible to a query t of its document; causal: if j <= t, or if both t and j are in the prefix.

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2.
"""

import torch
from torch import Tensor

from lineartime.ops.activations import attention_weights_oracle, by_document
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic.inputs import QuadraticOptions


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | FactoredBias | None,
    real: Tensor | None,
    options: QuadraticOptions,
    prefix: Tensor | None = None,
) -> Tensor:
    """Attend within each row: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real` and `prefix`, bool [R, L], mark tokens."""
    if isinstance(bias, Tensor) and bias.dim() == 3:
        rows = zip(q, k, v, bias, [None] * len(q) if real is None else real, strict=True)
        return torch.cat(
            [attend(a[None], b[None], c[None], d, None if e is None else e[None], options) for a, b, c, d, e in rows]
        )
    table = bias.dense() if isinstance(bias, FactoredBias) else bias
    slots = torch.arange(v.shape[1], device=v.device)

    def document(slots: Tensor, in_prefix: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, length = [], _published_length(options, len(v))
        for t in range(len(v)):
            visible = [j for j in range(len(v)) if j <= t or not options.causal or (in_prefix[t] and in_prefix[j])]
            bias = None if table is None else table[slots[t, 0], slots[visible, 0]]
            weights = attention_weights_oracle(
                k[visible] @ q[t], bias, d_qk=q.shape[-1], activation=options.activation, published_length=length
            )
            rows.append(weights @ v[visible])
        return torch.stack(rows)

    in_prefix = torch.zeros(v.shape[:2], dtype=torch.bool, device=v.device) if prefix is None else prefix
    places = slots[None, :, None].expand(len(v), -1, -1)
    return by_document(document, places, in_prefix[..., None], q, k, v, real=real)


def _published_length(options: QuadraticOptions, tokens: int) -> float | None:
    """The n of the published q.k / n for a document of `tokens` tokens; None for "count"."""
    if options.normalization == "count":
        return None
    return float(tokens if isinstance(options.normalization, str) else options.normalization)
