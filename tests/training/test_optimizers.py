from typing import get_args

import pytest
import torch

import lineartime
from lineartime.baselines.gau_ungated import GAUUngated
from lineartime.baselines.reformer import Reformer
from lineartime.choices import Precision, Task
from lineartime.layers import GLU, Attention, CrossGAU
from lineartime.models import LanguageModel, build_model
from lineartime.models.presets import resolve
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import OptimizerName, TrainConfig
from lineartime.training.optimizers import build_optimizer, hidden_maps

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
    def weights(**options: float) -> torch.Tensor:
        torch.manual_seed(0)
        layer = GLU(4, norm="rmsnorm")
        updates = build_optimizer(layer, TrainConfig(optimizer="muon", **options))  # type: ignore[arg-type]
        for step in range(2):
            updates.zero_grad()
            (layer(torch.randn(1, 2, 4)).square().sum() * (step + 1)).backward()
            updates.step()
        return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])

    for option in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "adamw_ratio", "momentum"):
        assert not torch.equal(weights(), weights(**{option: 0.5})), option


def test_updates_are_made_orthogonal_in_the_precision_of_the_run() -> None:
    def weights(precision: Precision) -> torch.Tensor:
        torch.manual_seed(0)
        layer = GLU(16)
        optimizer = build_optimizer(layer, TrainConfig(optimizer="muon", precision=precision))
        layer(torch.randn(1, 2, 16)).square().sum().backward()
        optimizer.step()
        return layer.to_output.weight.detach()

    assert not torch.equal(weights("fp32"), weights("bf16"))


def test_map_of_three_dimensions_is_for_adamw() -> None:
    class PerHead(GLU):
        maps = ("heads",)

        def __init__(self) -> None:
            super().__init__(4)
            self.heads = torch.nn.Parameter(torch.randn(2, 4, 4))

    layer = PerHead()
    optimizer = build_optimizer(layer, TrainConfig(optimizer="muon"))
    assert any(layer.heads is p for p in optimizer.param_groups[1]["params"])


def test_adamw_follows_the_schedule_at_its_ratio_of_the_learning_rate() -> None:
    layer = GLU(4)
    optimizer = build_optimizer(layer, TrainConfig(optimizer="muon", adamw_ratio=0.25))
    assert optimizer.set_learning_rate(0.5) == {"learning_rate": 0.5, "adamw_learning_rate": 0.125}
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125, 0.125]
    assert build_optimizer(layer, TrainConfig()).set_learning_rate(0.5) == {"learning_rate": 0.5}


def test_summary_names_the_peak_of_each_part_and_the_schedule() -> None:
    config = TrainConfig(optimizer="muon", adamw_ratio=0.1, learning_rate=0.02, schedule="cosine", warmup_steps=7)
    assert build_optimizer(GLU(4), config).summary(config) == (
        "Muon: 132 parameters, peak learning rate 0.02; AdamW: 34 parameters, peak learning rate 0.002; "
        "cosine schedule to a tenth of the peak, warm-up steps: 7"
    )
