"""NaN stays NaN in the kernels, as in PyTorch: training must see it."""

from typing import Any

import pytest
import torch

from lineartime.ops import mixed_chunk_attention, quadratic_attention

triton = pytest.importorskip("triton")
tl = triton.language
common: Any = pytest.importorskip("lineartime.ops.triton.common")


def test_rounding_to_tf32_keeps_every_nan_and_infinity(device: str) -> None:
    @common.jit  # here, where the environment tells whether it is interpreted
    def round_all(source: Any, to: Any, count: tl.constexpr) -> None:
        places = tl.arange(0, count)
        tl.store(to + places, common.as_operand(tl.load(source + places), tl.float32, "tf32"))

    patterns = [0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000, -0x800000, 0x3F801FFF, 0, 0]
    source = torch.tensor(patterns, dtype=torch.int32, device=device).view(torch.float32)
    found = torch.empty_like(source)
    round_all[(1,)](source, found, 8)
    assert found.isnan().tolist() == [True] * 3 + [False] * 5
    assert found[3:5].tolist() == [torch.inf, -torch.inf]
    assert found[5:].view(torch.int32).tolist() == [0x3F802000, 0, 0]


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
