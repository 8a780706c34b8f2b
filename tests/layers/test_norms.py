import pytest
import torch

from lineartime.layers import RMSNorm, ScaleNorm


@pytest.mark.parametrize(("norm", "scale"), [(ScaleNorm(), [1.0]), (RMSNorm(2), [1.0, 2.0])])
def test_norm_divides_by_the_root_mean_square_and_scales(norm: torch.nn.Module, scale: list[float]) -> None:
    x, by = torch.tensor([[3.0, 4.0]]), torch.tensor(scale)
    norm.load_state_dict({name: by.reshape(value.shape) for name, value in norm.state_dict().items()})
    torch.testing.assert_close(norm(x), x / (12.5 + 1e-5) ** 0.5 * by)


@pytest.mark.parametrize("norm", [ScaleNorm(), RMSNorm(8)])
def test_large_half_precision_inputs_do_not_overflow(norm: torch.nn.Module) -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)  # its square is beyond float16
    torch.testing.assert_close(norm(x), torch.ones(1, 8, dtype=torch.float16))
