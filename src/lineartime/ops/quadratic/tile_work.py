"""What the tiled form computes for a tile between matrix products, in plain PyTorch or by the functions of tiles.cpp.

Shapes: T tokens, s query/key width; of a tile: b rows of the batch, Q queries, K keys.

    weights = relu(score_scale * q.k + bias)^2, zero where a key is not visible
"""

from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lineartime.native import NATIVE_DTYPES, NativeFunctions, native_functions

SOURCE = Path(__file__).with_name("tiles.cpp")


class TileWork:
    """The work for tiles in plain PyTorch, for any machine.

    Args:
        bias: [T, T], or None.
        score_scale: the factor of the products q.k.
        causal: whether the last query of a tile sees all keys, and each query before it one key less.
        acc_dtype: the dtype of scores.
    """

    def __init__(self, bias: Tensor | None, score_scale: float, causal: bool, acc_dtype: torch.dtype) -> None:
        self.bias = None if bias is None else bias.to(acc_dtype).contiguous()
        self.score_scale, self.causal, self.acc_dtype = score_scale, causal, acc_dtype
        self.d_bias = torch.empty(0, 0, dtype=acc_dtype)

    def start_backward(self) -> None:
        """Set the sum `d_bias` to zero."""
        if self.bias is not None:
            self.d_bias = torch.zeros_like(self.bias)

    def weights(self, q: Tensor, k: Tensor, queries: slice) -> Tensor:
        """The weights: [b, Q, s] and [b, K, s] -> [b, Q, K], in the dtype of q; `queries` are the places of the queries."""
        scores = self._scores(q, k, queries)
        return scores.mul_(scores).to(q.dtype)

    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
        """The weights again, and the gradient of the products q.k, [b, Q, K] each; `d_weights` may be overwritten."""
        scores = self._scores(q, k, queries)
        d_scores = d_weights.to(self.acc_dtype).mul_(scores).mul_(2)
        if self.bias is not None:
            self.d_bias[queries, : k.shape[1]] += d_scores.sum(0)
        return scores.mul_(scores).to(q.dtype), d_scores.mul_(self.score_scale).to(q.dtype)

    def _scores(self, q: Tensor, k: Tensor, queries: slice) -> Tensor:
        """relu(score_scale * q.k + bias) where visible, zero elsewhere, [b, Q, K]."""
        part = None if self.bias is None else self.bias[queries, : k.shape[1]]
        if part is not None and q.dtype == self.acc_dtype:
            scores = torch.baddbmm(part, q, k.mT, alpha=self.score_scale)
        else:
            scores = torch.bmm(q, k.mT).to(self.acc_dtype).mul_(self.score_scale)
            scores = scores if part is None else scores.add_(part)
        if self.causal:  # only the last Q keys can come after a query
            n_queries = q.shape[1]
            scores[..., -n_queries:].mul_(torch.ones(n_queries, n_queries, dtype=self.acc_dtype).tril())
        return scores.relu_()


class NativeWork(TileWork):
    """The work for tiles by C++ functions, in one pass over the scores, with as many threads as PyTorch uses."""

    def __init__(
        self, functions: NativeFunctions, bias: Tensor | None, score_scale: float, causal: bool, acc_dtype: torch.dtype
    ) -> None:
        super().__init__(bias, score_scale, causal, acc_dtype)
        self._functions = functions

    @override
    def weights(self, q: Tensor, k: Tensor, queries: slice) -> Tensor:
        weights = torch.bmm(q, k.mT)
        self._functions.call("weigh", q.dtype, weights, self.bias, *self._options(queries), *weights.shape)
        return weights

    @override
    def weights_backward(self, q: Tensor, k: Tensor, d_weights: Tensor, queries: slice) -> tuple[Tensor, Tensor]:
        weights, d_products = torch.bmm(q, k.mT), d_weights.contiguous()
        d_bias = None if self.bias is None else self.d_bias
        options = self._options(queries)
        self._functions.call("weigh_backward", q.dtype, weights, d_products, self.bias, d_bias, *options, *weights.shape)
        return weights, d_products

    def _options(self, queries: slice) -> tuple[int, int, float, int]:
        """The offset of the bias of the queries, the stride of its rows, the factor of products, and whether it is causal."""
        length = 0 if self.bias is None else self.bias.shape[1]
        return queries.start * length, length, float(self.score_scale), int(self.causal)


def tile_work(compute: torch.dtype, bias: Tensor | None, score_scale: float, causal: bool, acc_dtype: torch.dtype) -> TileWork:
    """The work for tiles: by C++ functions if they can be built for `compute`, the dtype of products, else in PyTorch."""
    functions = native_functions(SOURCE) if compute in NATIVE_DTYPES else None
    if functions is None:
        return TileWork(bias, score_scale, causal, acc_dtype)
    return NativeWork(functions, bias, score_scale, causal, acc_dtype)
