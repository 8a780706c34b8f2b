"""What is known about a batch is worked out once, where the batch enters the model."""

from typing import Any

import pytest
import torch

import lineartime
from lineartime.layers import mixer
from lineartime.models import CausalLM, LayerConfig, backbone
from lineartime.ops.packing import describe
from lineartime.ops.state import State


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each description of a batch, in order, whether it is of streams."""
    streams: list[bool] = []

    def counting(*args: Any, **options: Any) -> Any:
        streams.append("position" in options)
        return describe(*args, **options)

    for module in (mixer, backbone):
        monkeypatch.setattr(module, "describe", counting)
    return streams


def build(preset: str) -> CausalLM:
    return lineartime.build(preset, d_model=16, n_blocks=3)


@pytest.mark.parametrize("preset", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny", "flash-weighted-tiny"])
def test_model_describes_a_batch_once_for_all_its_layers(preset: str, made: list[bool]) -> None:
    model = build(preset)
    ids = torch.randint(0, 258, (1, 40))
    model(ids)
    model(ids, mask=torch.rand(1, 40) > 0.3, cu_seqlens=torch.tensor([0, 7, 40]))
    assert made == [False] * 2
    model.extend(ids)
    assert made[2:] == [True]
    state = State.concatenate([model.extend(torch.zeros(1, length, dtype=torch.long))[1] for length in (5, 2)])
    made.clear()
    model.extend(torch.zeros(2, 1, dtype=torch.long), state)  # at different positions, which some mixers take one by one
    assert (made == [True]) == (preset != "flash-weighted-tiny")


@pytest.mark.parametrize("other", [{"chunk_size": 4}, {"kind": "gau"}])
def test_blocks_of_other_mixers_read_the_same_packing(other: dict[str, Any]) -> None:
    """A stack of different mixers reads padding, packs and streams as each mixer does."""
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=2, d_qk=8, chunk_size=8).double()
    config = LayerConfig(other.pop("kind", "flash"), d_qk=8, **other)
    list(model.backbone.blocks)[1].mixer = config.build(16, causal=True).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 258, (1, 37))
    mask = torch.arange(37)[None] >= 5
    whole = model(ids)
    torch.testing.assert_close(model(ids, mask=mask)[:, 5:], model(ids[:, 5:]))
    packed = model(ids, cu_seqlens=torch.tensor([0, 11, 37]))
    torch.testing.assert_close(packed[:, 11:], model(ids[:, 11:]))
    first, state = model.extend(ids[:, :20])
    torch.testing.assert_close(torch.cat([first, model.extend(ids[:, 20:], state)[0]], 1), whole)
