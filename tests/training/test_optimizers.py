"""Which optimiser updates each parameter, and the mathematics of Muon."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import lineartime
from lineartime.baselines.ablations import GAUUngated
from lineartime.baselines.reformer import Reformer
from lineartime.choices import Task
from lineartime.layers import GLU, Attention, CrossGAU
from lineartime.models import LanguageModel, build_model
from lineartime.models.systems import SYSTEMS, resolve
from lineartime.training.config import OptimizerName, TrainConfig
from lineartime.training.optimizers import COEFFICIENTS, ITERATIONS, Muon, build_optimizer, hidden_maps, orthogonal

VECTORS = (".gamma", ".beta", ".taps", ".mixture", ".scales", ".offsets")


def tiny(system: str) -> LanguageModel:
    task: Task = "clm" if SYSTEMS[system].mixer.why_not_causal is None else "mlm"
    return build_model(resolve(f"{system}-tiny", task, n_blocks=1))


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_matrix_is_decayed_and_every_map_inside_layers_is_muons(system: str) -> None:
    """Whatever has two dimensions is a matrix, but scales, offsets and taps of a convolution, which are several vectors."""
    model = tiny(system)
    for optimizer in get_args(OptimizerName):
        groups = build_optimizer(model, TrainConfig(weight_decay=0.3, optimizer=optimizer)).param_groups
        decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        assert len(decay) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        updated = {id(p) for group in groups if "momentum" in group for p in group["params"]}
        for name, parameter in model.named_parameters():
            matrix = parameter.dim() == 2 and not name.endswith(VECTORS)
            assert decay[id(parameter)] == (0.3 if matrix else 0.0), name
            kind, _, last = name.rpartition(".")
            is_map = last in ("mix_keys", "mix_values", "down", "up") or (
                last == "weight" and parameter.dim() == 2 and "blocks" in kind
            )
            assert (id(parameter) in updated) == (is_map and optimizer == "muon"), name


def test_maps_that_are_computed_together_are_told_apart() -> None:
    def rows(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        maps = hidden_maps(model)
        assert all(sum(rows) == len(parameter) for parameter, rows in maps.items())
        return {name: maps[parameter] for name, parameter in model.named_parameters() if parameter in maps}

    width = 16
    assert rows(lineartime.FLASH(width, d_qk=4)) == {"to_gate_value_base.weight": (32, 32, 4), "to_output.weight": (16,)}
    assert rows(GAUUngated(width, d_qk=4)) == {"to_gate_value_base.weight": (0, 64, 4), "to_output.weight": (16,)}
    assert rows(Attention(width, n_heads=2)) == {"to_qkv.weight": (16, 16, 16), "to_output.weight": (16,)}
    assert rows(Reformer(width, n_heads=2)) == {"to_qkv.weight": (16, 16), "to_output.weight": (16,)}
    assert rows(GLU(width)) == {"to_gate_value.weight": (43, 43), "to_output.weight": (16,)}
    cross = {"to_gate_query.weight": (32, 4), "to_value_key.weight": (32, 4), "to_output.weight": (16,)}
    assert rows(CrossGAU(width, d_qk=4)) == cross
    with_head = torch.nn.Sequential(GLU(width), torch.nn.Linear(width, 2))
    assert rows(with_head).keys() == {"0.to_gate_value.weight", "0.to_output.weight"}


def test_every_option_of_the_optimiser_is_used() -> None:
    def weights(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        layer = GLU(4, norm="rmsnorm")
        updates = build_optimizer(layer, TrainConfig(optimizer="muon", **options))
        for step in range(2):
            updates.zero_grad()
            (layer(torch.randn(1, 2, 4)).square().sum() * (step + 1)).backward()
            updates.step()
        return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])

    for option in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "adamw_ratio", "momentum"):
        assert not torch.equal(weights(), weights(**{option: 0.5})), option
    assert not torch.equal(weights(precision="fp32"), weights(precision="bf16"))


def test_adamw_follows_the_schedule_at_its_ratio_of_the_learning_rate() -> None:
    layer = GLU(4)
    optimizer = build_optimizer(layer, TrainConfig(optimizer="muon", adamw_ratio=0.25))
    assert optimizer.set_learning_rate(0.5) == {"learning_rate": 0.5, "adamw_learning_rate": 0.125}
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125, 0.125]
    assert build_optimizer(layer, TrainConfig()).set_learning_rate(0.5) == {"learning_rate": 0.5}


# Muon -----------------------------------------------------------------------------------------------------------------


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


def test_step_copies_nothing_to_the_host() -> None:
    with torch.device("meta"):  # where there are no values to copy
        model = lineartime.build("flash-tiny", n_blocks=2, d_model=16, d_qk=8, vocab_size=30)
    muon = Muon(hidden_maps(model), lr=1e-3, momentum=0.95, weight_decay=0.01, bf16=True)
    ids = torch.zeros(2, 20, dtype=torch.long, device="meta")
    for _ in range(2):
        model.loss(ids, ids).backward()
        muon.step()
