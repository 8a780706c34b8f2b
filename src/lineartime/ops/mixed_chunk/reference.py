"""Mixed chunk attention by its definition, one query at a time: slow, a reference for the other forms.

    quad:  o_quad[t] = sum over j in L(t) of relu(q_quad[t].k_quad[j] / sqrt(s) + bias[t - j])^2 v[j]  /  max(1, |L(t)|)
    lin:   o_lin[t]  = q_lin[t] . (sum over j in R(t) of k_lin[j] v[j]^T)                              /  max(1, |R(t)|)
           o_lin[t]  = q_lin[t] . S, for another memory than the sum: see `memories`, of R(t) in place of all chunks before

    L(t) = tokens of t's own chunk; causal: those with j <= t
    R(t) = every token of the document; causal: every token of the chunks before t's

With a prefix of P tokens, its tokens attend as in a document that ends there, and later tokens as in a causal layer:

    t < P:   L(t) = the prefix tokens of t's own chunk        R(t) = the P tokens of the prefix

Source: "Transformer Quality in Linear Time" (arXiv 2202.10447), section 3, with divisors that count visible keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops.activations import attention_weights_oracle
from lineartime.ops.batch import Batch
from lineartime.ops.documents import by_document
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions
from lineartime.ops.mixed_chunk.memories import FOLDED, Memory


def summary(memory: Memory, x: Tensor, v: Tensor, chunk_size: int) -> Tensor:
    """What whole chunks of tokens leave: keys with their weights [N, s], or [N, 2 s] of decay, and values [N, e] -> [s, e]."""
    k, logarithms = x.chunk(2, -1) if memory == "decay" else (F.normalize(x, dim=-1), x)
    unit, w = torch.eye(k.shape[1], dtype=v.dtype), x.norm(dim=-1) ** 2
    s: Tensor = v.new_zeros(k.shape[1], v.shape[1])
    if memory == "sum":
        s = x.mT @ v
    elif memory == "mesa":
        s = torch.linalg.inv(max(1, len(v)) * unit + x.mT @ x) @ x.mT @ v
    for start in range(0, len(v), chunk_size) if memory in FOLDED else ():
        chunk = slice(start, start + chunk_size)
        keys, values, weights = k[chunk], v[chunk], torch.diag(w[chunk])
        if memory == "decay":
            s = torch.diag(logarithms[chunk].mean(0).exp()) @ s + keys.mT @ values
        elif memory == "delta":
            s = s + keys.mT @ weights @ (values - keys @ s) / chunk_size
        else:
            s = torch.linalg.inv(unit + keys.mT @ weights @ keys) @ (s + keys.mT @ weights @ values)
    return s


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
            if options.memory != "sum":
                divisor = 1
            rows.append(o_quad + q_lin[t] @ summary(options.memory, k_lin[far], v[far], chunk_size) / divisor)
        return torch.stack(rows)

    in_prefix = torch.zeros(heads.v.shape[:2], dtype=torch.bool, device=heads.v.device)
    if batch.in_prefix is not None:
        in_prefix = batch.in_prefix
    return by_document(document, in_prefix[..., None], *heads, document=batch.document, real=batch.is_real)
