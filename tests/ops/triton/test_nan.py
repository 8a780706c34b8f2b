"""NaN stays NaN in the kernels, as in PyTorch: training must see it."""

import pytest
import torch

from lineartime.ops import quadratic_attention

pytest.importorskip("triton")


@pytest.mark.parametrize("causal", [True, False])
def test_score_that_is_nan_is_no_weight_of_zero(causal: bool, device: str) -> None:
    inputs = [torch.randn(1, 20, width, device=device, requires_grad=True) for width in (16, 16, 24)]
    with torch.no_grad():
        inputs[1][0, 7, 3] = torch.nan
    out = quadratic_attention(*inputs, causal=causal, backend="triton")
    assert out[0, 7].isnan().all()
    for gradient in torch.autograd.grad(out[0, 7].sum(), inputs[:2]):
        assert gradient[0, 7].isnan().any()
