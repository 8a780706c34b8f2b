"""From query-key products to attention weights: the activations and the normalisations.

Shapes: Q queries, K keys; every tensor may have leading batch dimensions.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from lineartime.ops.modes import acc_dtype

Activation = Literal["relu2", "softmax"]
Normalization = Literal["count", "paper", "paper_sum"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NORMALIZATIONS: tuple[str, ...] = ("count", "paper")
"""The normalizations of every attention. Mixed chunk attention also has "paper_sum", in which its linear part sums over chunks
without averaging."""
CHUNK_NORMALIZATIONS: tuple[str, ...] = (*NORMALIZATIONS, "paper_sum")


def relu2(scores: Tensor) -> Tensor:
    """The square of the positive part (arXiv 2202.10447, section 2.2)."""
    return scores.relu().square()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu2": relu2}
"""The activations of each score alone, whose weights the normalization divides. `lineartime.foreign` adds another one."""
SOFTMAXES: dict[str, Callable[[Tensor], Tensor] | None] = {"softmax": None}
"""The softmaxes, with the factor of their scores as a function of the number of visible keys; None for no factor."""


def known_activations() -> tuple[str, ...]:
    """All activations: those of `ACTIVATIONS`, and those that were added."""
    return (*FUNCTIONS, *SOFTMAXES)


def attention_weights_oracle(
    products: Tensor, bias: Tensor | None, *, d_qk: int, activation: Activation, published_length: float | None
) -> Tensor:
    """The definition of `attention_weights` for one query and its K visible keys: products q.k [K], bias [K] -> [K]."""
    n = len(products)
    offset = 0 if bias is None else bias
    score = products / math.sqrt(d_qk) + offset
    if activation in SOFTMAXES:
        factor = SOFTMAXES[activation]
        return (score if factor is None else score * factor(score.new_tensor(float(n)))).softmax(0)
    if published_length is not None:
        score = products / published_length + offset
    weights = FUNCTIONS[activation](score)
    return weights if published_length is not None else weights / max(1, n)


def attention_weights(
    products: Tensor,
    *,
    d_qk: int,
    visible: Tensor | None,
    bias: Tensor | None,
    activation: Activation,
    published_length: float | Tensor | None,
) -> Tensor:
    """Turn products q.k into attention weights.

    Args:
        products: [..., Q, K] the products q.k, not yet scaled.
        d_qk: the width s of queries and keys; scores are q.k / sqrt(s) + bias.
        visible: bool, broadcastable to [..., Q, K]; None if all keys are visible to every query.
        bias: [Q, K], or None.
        activation: one of `known_activations`.
        published_length: None divides relu2 weights by the number of visible keys. A number n follows the published
            pseudo-code instead: scores are q.k / n + bias, and weights are not divided. Softmax has its own normaliser and
            ignores this.

    Returns:
        [..., Q, K] in float32 (float64 for float64 products); a row without visible keys is all zeros.
    """
    # Squares of large scores and long sums lose digits, or overflow, in half precision.
    products = products.to(acc_dtype(products))
    is_softmax = activation in SOFTMAXES
    if published_length is None or is_softmax:
        scores = products * d_qk**-0.5
    else:
        scores = products / published_length
    if bias is not None:
        scores = scores + bias
    if is_softmax:
        factor = SOFTMAXES[activation]
        if factor is not None:
            scores = scores * factor(_visible_count(visible, scores))
        if visible is None:
            return torch.softmax(scores, -1)
        # The second mask is for rows without visible keys: there, a softmax of equal scores is uniform, not zero.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1).masked_fill(~visible, 0.0)

    weights = FUNCTIONS[activation](scores)
    if published_length is None:
        count = _visible_count(visible, weights)
        return weights * (1 / count if visible is None else visible / count)
    return weights if visible is None else weights * visible


def _visible_count(visible: Tensor | None, like: Tensor) -> Tensor:
    """The number of visible keys of a query, at least 1, in the dtype of `like` [..., Q, K]: [..., Q or 1, 1]."""
    count = like.new_full((), like.shape[-1]) if visible is None else visible.sum(-1, keepdim=True)
    return count.clamp(min=1).to(like.dtype)


def by_document(
    attend: Callable[..., Tensor], *tensors: Tensor, document: Tensor | None = None, real: Tensor | None = None
) -> Tensor:
    """Apply a definition to the real tokens of each document separately; slow.

    `attend` maps the tensors of one document, [n, f] each with n > 0, to [n, e]; the last of `tensors` has width e. All of them
    are [B, T, f]; the result is [B, T, e], with zeros at padding. `document`, int64 [T], is that of each token, and `real`,
    bool [B, T], is False for padding; None for one document, and if there is no padding.
    """
    rows, length, _ = tensors[-1].shape
    if document is None:
        document = torch.zeros(length, dtype=torch.long, device=tensors[-1].device)
    out = torch.zeros_like(tensors[-1])
    for row in range(rows):
        for one in document.unique():
            own = document == one if real is None else (document == one) & real[row]
            tokens = own.nonzero()[:, 0]
            if len(tokens):
                places = (torch.full_like(tokens, row), tokens)
                out = out.index_put(places, attend(*(tensor[row, tokens] for tensor in tensors)))
    return out
