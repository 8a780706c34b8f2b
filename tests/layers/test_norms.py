import pytest
import torch

from lineartime.errors import ArgumentError
from lineartime.layers import GAU, RMSNorm, ScaleNorm


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


@pytest.mark.parametrize("options", [{"norm": "batchnorm"}, {"norm_eps": 0.0}, {"norm_eps": float("nan")}])
def test_a_norm_that_cannot_be_built_is_named(options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))} is .*, but must be "):
        GAU(8, **options)  # type: ignore[arg-type]
