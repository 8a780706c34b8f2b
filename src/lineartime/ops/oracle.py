"""Mixed chunk attention by its definition, one query at a time: slow, a reference for the other forms.

    quad:  o_quad[t] = row(|L(t)|) sum over j in L(t) of f(score q_quad[t].k_quad[j] + bias[j - t]) v[j]
    lin:   o_lin[t]  = sum(|R(t)|) q_lin[t] . (sum over j in R(t) of k_lin[j] v[j]^T)

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = every token of the document; causal: every token of the chunks before t's

With a prefix of P tokens, its tokens attend as in a document that ends there, and later tokens as in a causal layer:

    t < P:   L(t) = the prefix tokens of t's own chunk        R(t) = the P tokens of the prefix

f is relu^2. A softmax over L(t) takes the place of f and row. Without chunks, the chunk is the document.

Shapes: N tokens, T tokens of a document, s query/key width, e value width.
Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), sections 2.2 and 3; `Scales` are its divisors, as factors.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lineartime.ops.activations import FUNCTIONS, SOFTMAXES
from lineartime.ops.packing import Packing

if TYPE_CHECKING:
    from lineartime.ops.mixed_chunk import MixedChunkOptions


def attend(
    q_quad: Tensor | None, k_quad: Tensor | None, q_lin: Tensor | None, k_lin: Tensor | None, v: Tensor, packing: Packing,
    options: "MixedChunkOptions",
) -> Tensor:  # fmt: skip
    """o_quad + o_lin of whole sequences, [N, e]; a part without queries is left out."""
    documents = []
    prefixes = [0] * len(packing.new) if packing.prefix is None else packing.prefix.tolist()
    ends = packing.new.cumsum(0).tolist()
    for start, stop, prefix in zip([0, *ends], ends, prefixes, strict=False):
        q1, k1, q2, k2 = (None if x is None else x[start:stop] for x in (q_quad, k_quad, q_lin, k_lin))
        documents.append(of_document(q1, k1, q2, k2, v[start:stop], options, prefix))
    return torch.cat(documents) if documents else v


def of_document(
    q_quad: Tensor | None, k_quad: Tensor | None, q_lin: Tensor | None, k_lin: Tensor | None, v: Tensor,
    options: "MixedChunkOptions", prefix: int = 0,
) -> Tensor:  # fmt: skip
    """o_quad + o_lin of one document, [T, s] and [T, e] -> [T, e]."""
    tokens, outputs = range(len(v)), []
    size = options.chunk_size or max(1, len(v))
    score = 1 / max(1, len(v)) if options.scales.score is None else options.scales.score
    bias = None if options.bias is None else options.bias(len(v) if options.chunk_size is None else size)
    for t in tokens:
        causal = options.causal and t >= prefix
        visible = [j for j in tokens if j < prefix or not options.causal] if not causal else list(tokens)
        near = [j for j in visible if j // size == t // size and (j <= t or not causal)]
        far = [j for j in visible if j // size < t // size or not causal]
        out, n = torch.zeros_like(v[t]), v.new_tensor(float(len(near)))
        if q_quad is not None and k_quad is not None:
            offset = 0 if bias is None else bias[[j - t + len(bias) // 2 for j in near]]
            scores = k_quad[near] @ q_quad[t] * score + (score * offset if options.scales.of_bias else offset)
            if options.activation in SOFTMAXES:
                factor = SOFTMAXES[options.activation]
                weights = (scores if factor is None else scores * factor(n)).softmax(0)
            else:
                weights = FUNCTIONS[options.activation](scores) * options.scales.row(n)
            out = out + weights @ v[near]
        if q_lin is not None:
            keys = k_quad if k_lin is None else k_lin
            assert keys is not None
            by = options.scales.sum if causal or options.scales.prefix is None else options.scales.prefix
            out = out + by(v.new_tensor(float(len(far)))) * q_lin[t] @ (keys[far].mT @ v[far])
        outputs.append(out)
    return torch.stack(outputs) if outputs else v
