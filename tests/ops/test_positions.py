import math

import pytest
import torch
from tests.definitions import assert_same_with_gradients
from tests.pairs import every_pair
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops import rope, sinusoid
from lineartime.ops.positions import by_distance, sum_by_distance


def test_rope_pairs_the_two_halves_and_turns_each_pair_by_its_angle() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)  # features 0 and 2 at frequency 1, and 1 and 3 at 1/100
    expected = [[math.cos(2), math.cos(0.02), math.sin(2), math.sin(0.02)]]
    torch.testing.assert_close(rope(x, torch.tensor([2])), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("far", [10**6, 10**8])
def test_products_of_rotated_vectors_depend_on_the_distance_alone_even_far_out(far: int) -> None:
    q, k = torch.randn(2, 1, 64)

    def product(start: int) -> Tensor:
        return (rope(q, torch.tensor([start + 5])) * rope(k, torch.tensor([start]))).sum()

    torch.testing.assert_close(product(0), product(far), atol=1e-4, rtol=0)


@every_pair(queries=[1, 2, 5], keys=[1, 3, 7])
def test_bias_by_distance_is_read_at_key_minus_query_and_its_gradient_is_the_sum_of_each_distance(
    queries: int, keys: int
) -> None:
    values = torch.randn(queries + keys - 1, dtype=torch.float64, requires_grad=True)
    distance = torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1
    assert_same_with_gradients(by_distance(values, queries), values[distance], [values], atol=1e-12)
    weights = torch.randn(queries, keys, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((values[distance] * weights).sum(), values)
    torch.testing.assert_close(sum_by_distance(weights), gradient, atol=1e-12, rtol=0)


def test_sinusoid_holds_sines_then_cosines() -> None:
    table = sinusoid(torch.tensor([0, 2]), 4, torch.float64)
    expected = torch.tensor([[0, 0, 1, 1], [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]], dtype=torch.float64)
    torch.testing.assert_close(table, expected)


def test_odd_widths_have_no_pairs_of_features() -> None:
    with pytest.raises(ArgumentError, match="x has 5 features, but must have an even number"):
        rope(torch.randn(3, 5), torch.arange(3))
    with pytest.raises(ArgumentError, match="d_model is 5, but must be even"):
        sinusoid(torch.arange(3), 5, torch.float32)
