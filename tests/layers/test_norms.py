import pytest
import torch

from lineartime.layers import RMSNorm, ScaleNorm


def test_scalenorm_divides_by_the_root_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0]])
    norm = ScaleNorm()
    torch.testing.assert_close(norm(x), x / (12.5 + 1e-5) ** 0.5)
    assert sum(p.numel() for p in norm.parameters()) == 1


def test_rmsnorm_scales_each_feature() -> None:
    norm = RMSNorm(2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(norm(x), x / (12.5 + 1e-5) ** 0.5 * torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("norm", [ScaleNorm(), RMSNorm(8)])
def test_large_half_precision_inputs_do_not_overflow(norm: torch.nn.Module) -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its square is beyond float16
    torch.testing.assert_close(norm(x), torch.ones(1, 8, dtype=torch.float16))
