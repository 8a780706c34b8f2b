"""What is known about a batch is worked out once, where the batch enters the model."""

from typing import Any

import pytest
import torch

import lineartime
from lineartime.layers import residual
from lineartime.models import CausalLM


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that made layouts, in order."""
    names: list[str] = []
    for name in ("make_layout", "stream_layout", "step_layout"):
        original = getattr(residual, name)

        def count(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            names.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(residual, name, count)
    return names


def build(preset: str) -> CausalLM:
    return lineartime.build(preset, d_model=16, n_blocks=3)


@pytest.mark.parametrize("preset", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny", "flash-weighted-tiny"])
def test_a_model_makes_one_layout_for_all_its_layers(preset: str, made: list[str]) -> None:
    model = build(preset)
    ids = torch.randint(0, 258, (1, 40))
    model(ids)
    model(ids, mask=torch.rand(1, 40) > 0.3, cu_seqlens=torch.tensor([0, 7, 40]))
    assert made == ["make_layout"] * 2
    model.extend(ids, model.init_state(1))
    assert made[2:] == ["stream_layout"]


def test_a_step_of_joined_streams_makes_one_layout(made: list[str]) -> None:
    model = build("flash-tiny")
    _, state = model.extend(torch.randint(0, 258, (1, 5)), model.init_state(1))
    streams = model.join_streams([state, model.init_state(1)])
    made.clear()
    model.step(torch.zeros(2, 1, dtype=torch.long), streams)
    assert made == ["step_layout"]


def test_a_mixer_that_cannot_step_says_so_when_streams_are_joined() -> None:
    model = build("transformer++-tiny")
    with pytest.raises(ValueError, match="Attention continues streams at one position only"):
        model.join_streams([model.init_state(1)])
