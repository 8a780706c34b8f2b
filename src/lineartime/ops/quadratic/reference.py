"""Quadratic attention by its definition, one query at a time: slow, and only there to be believed.

    out[t] = sum over visible j of relu(q[t].k[j] / sqrt(s) + bias[t, j])^2 v[j]  /  n        n: how many keys are visible

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 2.2.
"""

import torch
from torch import Tensor

from lineartime.ops.activations import attention_weights_oracle
from lineartime.ops.documents import by_document
from lineartime.ops.layout import Layout
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic.inputs import QuadraticOptions


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | FactoredBias | None, real: Tensor | None, options: QuadraticOptions
) -> Tensor:
    """Every row by itself: [R, L, s], [R, L, s], [R, L, e] -> [R, L, e]; `real`, bool [R, L], marks tokens."""
    table = bias.dense() if isinstance(bias, FactoredBias) else bias
    slots = torch.arange(v.shape[1], device=v.device)
    normalization = options.normalization

    def document(slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for t in range(len(v)):
            visible = [j for j in range(len(v)) if j <= t or not options.causal]
            weights = attention_weights_oracle(
                k[visible] @ q[t],
                None if table is None else table[slots[t, 0], slots[visible, 0]],
                d_qk=q.shape[-1],
                activation=options.activation,
                published_length=None
                if normalization == "count"
                else float(len(v) if normalization == "paper" else normalization),
            )
            rows.append(weights @ v[visible])
        return torch.stack(rows)

    return by_document(document, slots[None, :, None].expand(len(v), -1, -1), q, k, v, layout=Layout(real, slots))
