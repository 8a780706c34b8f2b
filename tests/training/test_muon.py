import pytest
import torch
from torch import Tensor, nn

import lineartime
from lineartime.training.optimizers import COEFFICIENTS, ITERATIONS, Muon, hidden_maps, orthogonal


def updated(weights: Tensor, gradients: list[Tensor], rows: list[int], bf16: bool = False, decay: float = 0.1) -> Tensor:
    """The weights after a step for each gradient."""
    parameter = nn.Parameter(weights.clone())
    muon = Muon({parameter: rows}, lr=0.1, momentum=0.9, weight_decay=decay, bf16=bf16)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        muon.step()
    return parameter.detach()


@pytest.mark.parametrize("shape", [(7, 12), (12, 7)])
def test_newton_schulz_applies_its_polynomial_to_the_singular_values(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm()
    for _ in range(ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonal(x), u @ s.diag() @ vt, atol=1e-10, rtol=0)
    assert 0.6 < s.max() < 1.3


def test_step_is_momentum_nesterov_orthogonalisation_and_decay() -> None:
    w, first, second = torch.randn(3, 6, 4, dtype=torch.float64)
    mean = 0.1 * first
    expected = w * (1 - 0.1 * 0.1) - 0.1 * 0.2 * 6**0.5 * orthogonal(0.9 * mean + 0.1 * first)
    mean = 0.9 * mean + 0.1 * second
    expected = expected * (1 - 0.1 * 0.1) - 0.1 * 0.2 * 6**0.5 * orthogonal(0.9 * mean + 0.1 * second)
    torch.testing.assert_close(updated(w, [first, second], [6]), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(24, 16), (16, 40)])
def test_one_map_is_updated_as_by_pytorch(shape: tuple[int, int]) -> None:
    w, *gradients = torch.randn(4, *shape)
    parameter = nn.Parameter(w.clone())
    theirs = torch.optim.Muon([parameter], lr=0.1, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        parameter.grad = gradient.clone()
        theirs.step()
    ours = updated(w, gradients, [shape[0]], bf16=True)
    torch.testing.assert_close(ours, parameter.detach(), atol=1e-6, rtol=0)
    exact = updated(w, gradients, [shape[0]])
    torch.testing.assert_close(exact, ours, atol=0.02, rtol=0)  # the digits of bf16
    assert not torch.equal(exact, ours)


def test_each_map_of_a_matrix_is_updated_as_if_it_were_alone() -> None:
    rows = [5, 0, 2, 9]  # a gated unit without a gate has a map of no rows
    w, *gradients = torch.randn(3, sum(rows), 6)
    parts = zip(w.split(rows), *(gradient.split(rows) for gradient in gradients), strict=True)
    alone = torch.cat([updated(part, [*of_part], [len(part)]) for part, *of_part in parts])
    torch.testing.assert_close(updated(w, gradients, rows), alone)
    assert not torch.allclose(updated(w, gradients, [sum(rows)]), alone, atol=1e-2)


def test_gradient_of_zero_decays_and_none_changes_nothing() -> None:
    w = torch.randn(4, 6)
    torch.testing.assert_close(updated(w, [torch.zeros(4, 6)], [4]), w * 0.99)
    parameter = nn.Parameter(w.clone())
    muon = Muon({parameter: [4]}, lr=0.1, momentum=0.9, weight_decay=0.1, bf16=False)
    muon.step()
    assert torch.equal(parameter, w)
    assert not muon.state[parameter]


@pytest.mark.parametrize("bf16", [True])
def test_step_copies_nothing_to_the_host(bf16: bool) -> None:
    with torch.device("meta"):  # where there are no values to copy
        model = lineartime.build("flash-tiny", n_blocks=2, d_model=16, d_qk=8, vocab_size=30)
    muon = Muon(hidden_maps(model), lr=1e-3, momentum=0.95, weight_decay=0.01, bf16=bf16)
    ids = torch.zeros(2, 20, dtype=torch.long, device="meta")
    for _ in range(2):
        model.loss(ids, ids).backward()
        muon.step()
