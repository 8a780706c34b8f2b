"""Gradients in bf16 on a CPU. A sum over tokens that is taken in bf16 stops growing at 256 equal parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lineartime
from lineartime.layers import FLASH
from lineartime.ops.modes import look_up

TOKENS = 4096


def errors(model: nn.Module, inputs: Tensor, half: nn.Module, *, autocast: bool) -> dict[str, float]:
    """The relative error of the gradient of each parameter of `half`, a copy of a model in fp32."""
    gradients = []
    for each, enabled in ((model, False), (half, autocast)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logits = each(inputs)
        F.cross_entropy(logits.float().flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % 3).backward()
        gradients.append({name: parameter.grad.float() for name, parameter in each.named_parameters()})
    exact, found = gradients
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


@pytest.mark.parametrize(
    ("system", "options"),
    [
        ("flash", {"d_qk": 8, "chunk_size": 32}),  # a table of relative biases
        ("combiner", {"n_heads": 2, "chunk_size": 32}),  # a norm of summaries
        ("flash-quad", {"d_qk": 8}),  # rotary biases
        ("transformer", {"n_heads": 2, "absolute_position": "learned", "max_positions": TOKENS // 16}),
    ],
)
def test_sums_over_tokens_of_a_bf16_model_are_exact(system: str, options: dict[str, int]) -> None:
    sizes = {"d_model": 16, "n_blocks": 1, "vocab_size": 8, **options}
    model, half = (lineartime.build(f"{system}-tiny", **sizes) for _ in range(2))
    half.load_state_dict(model.state_dict())
    found = errors(model, torch.randint(8, (16, TOKENS // 16)), half.bfloat16(), autocast=False)
    assert max(found.values()) < 0.1, found


@pytest.mark.parametrize("width", [(), (4,)])  # a table of biases, and of vectors
def test_rows_that_are_looked_up_often_get_all_of_their_gradient(width: tuple[int, ...]) -> None:
    table = torch.zeros(3, *width, dtype=torch.bfloat16, requires_grad=True)
    look_up(table, torch.zeros(TOKENS, dtype=torch.long)).sum().backward()
    assert table.grad is not None
    assert table.grad[0].unique().item() == TOKENS


def test_norms_of_layers_sum_over_tokens_in_fp32_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(3, 16), FLASH(16, d_qk=8, chunk_size=32), nn.Linear(16, 3))  # bf16 enters the layer
    half = nn.Sequential(nn.Linear(3, 16), FLASH(16, d_qk=8, chunk_size=32), nn.Linear(16, 3))
    half.load_state_dict(model.state_dict())
    found = errors(model, torch.randn(4, TOKENS // 4, 3), half, autocast=True)
    assert max(found.values()) < 0.1, found
