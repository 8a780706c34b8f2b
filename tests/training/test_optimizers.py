import math
from collections.abc import Callable

import pytest
import torch

import lineartime
from lineartime.models import build_model
from lineartime.models.config import Task
from lineartime.models.presets import resolve
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig
from lineartime.training.optimizers import build_optimizer, learning_rate


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_matrix_of_a_system_is_decayed_and_nothing_else(system: str) -> None:
    """Whatever has two dimensions is a matrix, but the scales and offsets of a gated unit, which are several vectors."""
    task: Task = "clm" if SYSTEMS[system].mixer.why_not_causal is None else "mlm"
    model = build_model(resolve(f"{system}-tiny", task, n_blocks=1))
    optimizer = build_optimizer(model, TrainConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and not name.endswith((".gamma", ".beta"))
        assert decay[id(parameter)] == (0.3 if matrix else 0.0), name


def test_scales_and_offsets_of_gau_are_not_matrices_although_they_look_like_one() -> None:
    model = lineartime.build("flash-tiny", n_blocks=1)
    optimizer = build_optimizer(model, TrainConfig())
    mixer = next(m for m in model.modules() if isinstance(m, lineartime.FLASH))
    assert mixer.gamma.dim() == 2
    assert any(mixer.gamma is p for p in optimizer.param_groups[1]["params"])


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    config = TrainConfig(steps=10, warmup_steps=4, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert [learning_rate(step, TrainConfig(steps=50, learning_rate=1.0)) for step in (0, 4)] == [0.2, 1.0]  # a tenth
    assert learning_rate(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=2.0)) == 2.0


def test_a_cosine_falls_from_the_peak_to_a_tenth_of_it_along_its_formula() -> None:
    config = TrainConfig(steps=12, warmup_steps=4, learning_rate=2.0, schedule="cosine")
    rates = [learning_rate(step, config) for step in range(13)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[4:] == pytest.approx([0.2 + 1.8 * (1 + math.cos(math.pi * x / 8)) / 2 for x in range(9)])
    assert rates[8] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[12] == pytest.approx(0.2)
    assert learning_rate(0, TrainConfig(steps=1, warmup_steps=0, learning_rate=2.0, schedule="cosine")) == 2.0


@pytest.mark.parametrize("option", ["learning_rate", "beta1", "beta2", "epsilon", "weight_decay"])
def test_every_option_of_the_optimiser_is_used(option: str, config: Callable[..., TrainConfig]) -> None:
    def weights(value: float | None) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 3)
        options = TrainConfig() if value is None else TrainConfig(**{option: value})
        optimizer = build_optimizer(layer, options)
        for step in range(2):
            optimizer.zero_grad()
            (layer(torch.ones(1, 3)).square().sum() * (step + 1)).backward()
            optimizer.step()
        return layer.weight.detach()

    assert not torch.equal(weights(None), weights(0.5))
