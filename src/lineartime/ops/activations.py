"""From query-key products to attention weights: the activations and the normalisations.

Shapes: Q queries, K keys; every tensor may have leading batch dimensions.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lineartime.ops.precision import acc_dtype

Activation = Literal["relu2", "softmax", "softmax_plus", "laplace"]
Normalization = Literal["count", "paper", "paper_sum", "paper_bias"]

ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NORMALIZATIONS: tuple[str, ...] = ("count", "paper")
"""The normalizations of every attention. Mixed chunk attention also has "paper_sum", in which its linear part sums over chunks
without averaging. Quadratic attention also has "paper_bias", which divides the bias too."""
CHUNK_NORMALIZATIONS: tuple[str, ...] = (*NORMALIZATIONS, "paper_sum")
QUADRATIC_NORMALIZATIONS: tuple[str, ...] = (*NORMALIZATIONS, "paper_bias")

_LAPLACE_MEAN = math.sqrt(1 / 2)
_LAPLACE_DEVIATION = math.sqrt(1 / (4 * math.pi))
_SOFTMAX_PLUS_LENGTH = 512
"""The number of visible keys at which `softmax_plus` is a softmax: the length that GAU-alpha was trained with."""


def laplace(scores: Tensor) -> Tensor:
    """The Laplace attention function of Mega (arXiv 2209.10655, eq. 16): a bounded alternative to relu2."""
    return 0.5 * (1 + torch.erf((scores - _LAPLACE_MEAN) / (_LAPLACE_DEVIATION * math.sqrt(2))))


def attention_weights_oracle(
    products: Tensor, bias: Tensor | None, *, d_qk: int, activation: Activation, published_length: float | None
) -> Tensor:
    """The definition of `attention_weights` for one query and its K visible keys: products q.k [K], bias [K] -> [K]."""
    n = len(products)
    offset = 0 if bias is None else bias
    score = products / math.sqrt(d_qk) + offset
    if activation == "softmax":
        return score.softmax(0)
    if activation == "softmax_plus":
        return (score * math.log(n, _SOFTMAX_PLUS_LENGTH)).softmax(0)
    if published_length is not None:
        score = products / published_length + offset
    weights: Tensor = laplace(score) if activation == "laplace" else torch.relu(score).square()
    return weights if published_length is not None else weights / max(1, n)


def attention_weights(
    products: Tensor,
    *,
    d_qk: int,
    visible: Tensor | None,
    bias: Tensor | None,
    activation: Activation,
    published_length: float | Tensor | None,
    share: Tensor | None = None,
) -> Tensor:
    """Turn products q.k into attention weights.

    Args:
        products: [..., Q, K] the products q.k, not yet scaled.
        d_qk: the width s of queries and keys; scores are q.k / sqrt(s) + bias.
        visible: bool, broadcastable to [..., Q, K]; None if all keys are visible to every query.
        bias: [Q, K], or None.
        activation: one of `ACTIVATIONS`.
        published_length: None divides relu2 and laplace weights by the number of visible keys. A number n
            follows the published pseudo-code instead: scores are q.k / n + bias, and weights are not divided.
            Softmax has its own normaliser and ignores this.
        share: the `visible_share` of `visible` and `published_length`, if the caller has already computed it.

    Returns:
        [..., Q, K] in float32 (float64 for float64 products); a row without visible keys is all zeros.
    """
    # Squares of large scores and long sums lose digits, or overflow, in half precision.
    products = products.to(acc_dtype(products))
    is_softmax = activation in ("softmax", "softmax_plus")
    if published_length is None or is_softmax:
        scores = products * d_qk**-0.5
    else:
        scores = products / published_length
    if bias is not None:
        scores = scores + bias
    if is_softmax:
        if activation == "softmax_plus":
            scores = scores * (_visible_count(visible, scores).log() / math.log(_SOFTMAX_PLUS_LENGTH))
        if visible is None:
            return torch.softmax(scores, -1)
        # The second mask is for rows without visible keys: there, a softmax of equal scores is uniform, not zero.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1).masked_fill(~visible, 0.0)

    weights = scores.relu().square() if activation == "relu2" else laplace(scores)
    if share is None:
        share = visible_share(visible, published_length, weights)
    return weights if share is None else weights * share


def visible_share(visible: Tensor | None, published_length: float | Tensor | None, like: Tensor) -> Tensor | None:
    """The factor of relu2 and laplace weights [..., Q, K], zero where a key is not visible; None if there is none."""
    if published_length is not None:
        return visible
    count = _visible_count(visible, like)
    return 1 / count if visible is None else visible / count


def _visible_count(visible: Tensor | None, like: Tensor) -> Tensor:
    """The number of visible keys of a query, at least 1, in the dtype of `like` [..., Q, K]: [..., Q or 1, 1]."""
    count = like.new_full((), like.shape[-1]) if visible is None else visible.sum(-1, keepdim=True)
    return count.clamp(min=1).to(like.dtype)
