"""Chunks with an offset: every form of a layer against the definition, which reads one query at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, set_backend
from lineartime.ops.mixed_chunk import cpu

CHUNK = 4
BATCHES: dict[str, dict[str, Tensor]] = {
    "rows": {},
    "mask": {"mask": torch.tensor([[1, 1, 0] * 11 + [1], [0] * 30 + [1] * 4])},
    "prefix": {"prefix_lengths": torch.tensor([3, 21])},
    "pack": {"cu_seqlens": torch.tensor([0, 0, 1, 14, 18, 34])},
}


def values_and_gradients(layer: FLASH, backend: Any, x: Tensor, **batch: Any) -> list[Tensor]:
    set_backend(layer, backend)
    out = layer(x, **batch)
    direction = (torch.arange(out.numel(), dtype=x.dtype) % 7 - 3).view_as(out)
    return [out, *torch.autograd.grad((out * direction).sum(), [x, *layer.parameters()], materialize_grads=True)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("offset", "kind", "length"), [(3, "rows", 1), (1, "rows", 3), (2, "rows", 17), *((2, k, 34) for k in BATCHES)]
)
def test_every_form_has_the_chunks_of_the_definition(
    causal: bool, offset: int, kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "prefix" and not causal:
        return
    monkeypatch.setattr(cpu, "TILE_TOKENS", 2 * CHUNK)
    options: dict[str, Any] = {"normalization": "paper", "initial_scores": "unit", "chunk_offset": offset}
    layer = FLASH(8, d_qk=4, chunk_size=CHUNK, causal=causal, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    x = torch.randn(1 if kind == "pack" else 2, length, 8, dtype=torch.float64, requires_grad=True)
    exact, *found = (values_and_gradients(layer, each, x, **BATCHES[kind]) for each in ("oracle", "torch", "tiled"))
    for each in found:
        torch.testing.assert_close(each, exact, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chunk_offset": 4, "normalization": "paper"},
            "chunk_offset is 4, but must be an integer from 0 to 3, below chunk_size",
        ),
        ({"chunk_offset": -1}, "chunk_offset is -1, but must be an integer from 0 to 3"),
        ({"chunk_offset": 2}, "chunk_offset is 2, but normalization is 'count': use 0, or normalization='paper'"),
        ({"chunk_offset": 2, "memory": "mesa"}, "chunk_offset is 2, but memory is 'mesa': use 0, or memory='sum'"),
    ],
)
def test_an_offset_that_would_be_counted_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        FLASH(8, d_qk=4, chunk_size=CHUNK, **options)
