"""Learned parts of positions: what a printed model tells of them."""

import pytest
from torch import nn

from lineartime.layers.positions import LearnedPositions, RotaryBias, ScaledSin, TableBias


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (TableBias(32), "TableBias(max_length=32)"),
        (RotaryBias(8), "RotaryBias(d_qk=8)"),
        (ScaledSin(16), "ScaledSin(d_model=16)"),
        (LearnedPositions(64, 16), "LearnedPositions(max_positions=64, d_model=16)"),
    ],
)
def test_positions_show_their_sizes(part: nn.Module, shown: str) -> None:
    assert repr(part) == shown
