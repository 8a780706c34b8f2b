"""NaN stays NaN in the kernels, as in PyTorch: training must see it."""

from typing import Any

import pytest
import torch

from lineartime.ops import mixed_chunk_attention, quadratic_attention

pytest.importorskip("triton")


@pytest.mark.parametrize("op", [quadratic_attention, mixed_chunk_attention])
@pytest.mark.parametrize("causal", [True, False])
def test_a_score_that_is_nan_is_no_weight_of_zero(op: Any, causal: bool, device: str) -> None:
    mixed = op is mixed_chunk_attention
    inputs = [torch.randn(1, 20, width, device=device, requires_grad=True) for width in (16,) * (4 if mixed else 2) + (24,)]
    with torch.no_grad():
        inputs[1][0, 7, 3] = torch.nan  # of a key inside a chunk
    options: dict[str, Any] = {"chunk_size": 16} if mixed else {}
    out = op(*inputs, causal=causal, backend="triton", **options)
    assert out[0, 7].isnan().all()
    for gradient in torch.autograd.grad(out[0, 7].sum(), inputs[:2]):
        assert gradient[0, 7].isnan().any()
