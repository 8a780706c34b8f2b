"""What FlopCounterMode counts for operators of several forms: their matrix products, and those that are computed again."""

from torch import Tensor


def chunk_products(batch: int, n_chunks: int, chunk_size: int, of_pairs: int, n_sums: int, matrix: int) -> int:
    """Products of `of_pairs` features for all pairs of tokens in a chunk, and `n_sums` products with an s x e matrix."""
    return 2 * batch * chunk_size * (n_chunks * chunk_size * of_pairs + n_sums * matrix)


def pair_products(q: Tensor, v: Tensor, causal: bool, of_keys: int, of_values: int) -> int:
    """`of_keys` products of width s and `of_values` of width e for all pairs; 256 queries see no keys after them."""
    (rows, length, d_qk), d_value = q.shape, v.shape[-1]
    stops = [(start, min(start + 256, length)) for start in range(0, length, 256)]
    pairs = sum((stop - start) * (stop if causal else length) for start, stop in stops)
    flops: int = 2 * rows * pairs * (of_keys * d_qk + of_values * d_value)
    return flops
