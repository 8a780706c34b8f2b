import math

import pytest
import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops import rope, rotary_bias, sinusoid, table_bias


def test_rope_turns_a_pair_by_its_angle() -> None:
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)  # s = 2: one pair, frequency 1
    torch.testing.assert_close(rope(x, torch.tensor([3])), torch.tensor([[math.cos(3), math.sin(3)]], dtype=torch.float64))


def test_rope_pairs_the_two_halves() -> None:
    x = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)  # second pair: features 1 and 3, frequency 1/100
    expected = torch.tensor([[0.0, math.cos(0.02), 0.0, math.sin(0.02)]], dtype=torch.float64)
    torch.testing.assert_close(rope(x, torch.tensor([2])), expected)


def test_products_of_rotated_vectors_depend_on_the_distance_alone_even_far_out() -> None:
    q, k = torch.randn(2, 1, 64)

    def product(start: int) -> Tensor:
        return (rope(q, torch.tensor([start + 5])) * rope(k, torch.tensor([start]))).sum()

    torch.testing.assert_close(product(0), product(1_000_000), atol=1e-4, rtol=0)


def test_offset_zero_of_the_table_means_the_same_at_every_length() -> None:
    table = torch.arange(9.0)  # n_max = 5: the centre is 4
    for length in (1, 3, 5):
        positions = torch.arange(length)
        bias = table_bias(table, positions, positions)
        assert bias.diagonal().unique().item() == 4.0
    assert table_bias(table, torch.tensor([3]), torch.tensor([1])).item() == 2.0  # key two before the query: w[-2 + 4]


def test_rotary_bias_is_its_formula_and_depends_on_the_distance_alone() -> None:
    a, b = torch.randn(2, 8, dtype=torch.float64)
    positions = torch.arange(6)
    bias = rotary_bias(a, b, positions, positions).dense()
    t, j = 4, 1
    expected = rope(a[None], torch.tensor([t]))[0] @ rope(b[None], torch.tensor([j]))[0]
    torch.testing.assert_close(bias[t, j], expected)
    torch.testing.assert_close(bias, rotary_bias(a, b, positions + 7, positions + 7).dense())


def test_sinusoid_holds_sines_then_cosines() -> None:
    table = sinusoid(torch.tensor([0, 2]), 4, torch.float64)
    expected = torch.tensor([[0, 0, 1, 1], [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]], dtype=torch.float64)
    torch.testing.assert_close(table, expected)


def test_table_of_biases_is_never_read_beyond_its_ends() -> None:
    """Indices below zero would wrap around to the values of the other direction."""
    table = torch.arange(5.0)
    assert table_bias(table, torch.tensor([2]), torch.tensor([0])).item() == 0
    for query, key in ((4, 0), (0, 4)):
        with pytest.raises(ArgumentError, match="table has values for offsets up to 2, but there is one of 4: make it longer"):
            table_bias(table, torch.tensor([query]), torch.tensor([key]))


def test_odd_widths_have_no_pairs_of_features() -> None:
    with pytest.raises(ArgumentError, match="x has 5 features, but must have an even number"):
        rope(torch.randn(3, 5), torch.arange(3))
    with pytest.raises(ArgumentError, match="d_model is 5, but must be even"):
        sinusoid(torch.arange(3), 5, torch.float32)
