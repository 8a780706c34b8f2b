"""Mixed chunk attention by its definition, one query at a time: slow, a reference for the other forms.

    quad:  o_quad[t] = sum over j in L(t) of relu(q_quad[t].k_quad[j] / sqrt(s) + bias[t - j])^2 v[j]  /  max(1, |L(t)|)
    lin:   o_lin[t]  = q_lin[t] . (sum over j in R(t) of k_lin[j] v[j]^T)                              /  max(1, |R(t)|)
           o_lin[t]  = q_lin[t] . S, for the memory mesa: see `memories`, of R(t) in place of all chunks before

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = every token of the document; causal: every token of the chunks before t's

With a prefix of P tokens, its tokens attend as in a document that ends there, and later tokens as in a causal layer:

    t < P:   L(t) = the prefix tokens of t's own chunk        R(t) = the P tokens of the prefix

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3, with divisors that count visible keys.
"""

import torch
from torch import Tensor

from lineartime.ops.activations import attention_weights_oracle, by_document
from lineartime.ops.batch import Batch
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions


def attend(heads: Heads, bias: Tensor | None, batch: Batch, options: MixedChunkOptions) -> Tensor:
    """o_quad + o_lin, [B, T, e]."""
    chunk_size = options.chunk_size

    def document(in_prefix: Tensor, q_quad: Tensor, k_quad: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor) -> Tensor:
        rows, prefix = [], int(in_prefix.sum())
        for t in range(len(v)):
            chunk = t // chunk_size
            causal = options.causal and t >= prefix
            end = prefix if t < prefix else len(v)
            near = [j for j in range(end) if j // chunk_size == chunk and (j <= t or not causal)]
            far = [j for j in range(end) if j // chunk_size < chunk or not causal]

            weights = attention_weights_oracle(
                k_quad[near] @ q_quad[t],
                None if bias is None else bias[t % chunk_size, [j % chunk_size for j in near]],
                d_qk=len(q_quad[t]),
                activation=options.activation,
                published_length=options.published_length,
            )
            o_quad = weights @ v[near]

            chunks = -(-len(far) // chunk_size)
            count = chunks * chunk_size if options.normalization == "paper" else len(far)
            divisor = max(1, count + batch.elsewhere(causal))
            if options.normalization == "paper_sum" and causal:
                divisor = chunk_size
            summary = k_lin[far].mT @ v[far] / divisor
            if options.memory == "mesa":
                ridge = max(1, len(far)) * torch.eye(k_lin.shape[1], dtype=v.dtype)
                summary = torch.linalg.inv(ridge + k_lin[far].mT @ k_lin[far]) @ k_lin[far].mT @ v[far]
            rows.append(o_quad + q_lin[t] @ summary)
        return torch.stack(rows)

    in_prefix = torch.zeros(heads.v.shape[:2], dtype=torch.bool, device=heads.v.device)
    if batch.in_prefix is not None:
        in_prefix = batch.in_prefix
    return by_document(document, in_prefix[..., None], *heads, document=batch.document, real=batch.is_real)
