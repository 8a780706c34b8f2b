"""Modules without values."""

import torch
from torch import nn

from lineartime.shapes import _WithoutInitialValues, shapes_only


def test_modules_have_their_shapes_and_no_memory() -> None:
    with shapes_only():
        modules = [nn.Linear(3, 4), nn.Embedding(5, 6), nn.LayerNorm(7)]
        x = torch.zeros(2, 3)
    with _WithoutInitialValues():
        kept = nn.init.normal_(torch.full((2, 3), 3.0))
    assert kept.tolist() == [[3.0] * 3] * 2
    assert [list(module.weight.shape) for module in modules] == [[4, 3], [5, 6], [7]]
    assert all(parameter.is_meta for module in modules for parameter in module.parameters())
    assert x.is_meta
    assert modules[0](x).shape == (2, 4)


def test_outside_modules_are_filled_as_ever() -> None:
    with shapes_only():
        pass
    assert nn.Linear(3, 4).weight.std() > 0
