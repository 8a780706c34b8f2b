"""What is known about a batch is worked out once, where the batch enters the model."""

from typing import Any

import pytest
import torch

import lineartime
from lineartime.layers import mixer
from lineartime.models import CausalLM, LayerConfig
from lineartime.ops import quadratic


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that made layouts, in order."""
    names: list[str] = []
    for name in ("make_layout", "stream_layout", "step_layout"):
        original = getattr(mixer, name)

        def count(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            names.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(mixer, name, count)
        if name == "make_layout":  # an operation that a layer calls must not make another one
            monkeypatch.setattr(quadratic, name, count)
    return names


def build(preset: str) -> CausalLM:
    return lineartime.build(preset, d_model=16, n_blocks=3)


@pytest.mark.parametrize(
    "preset", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny", "flash-weighted-tiny", "mhsa-relu2-tiny"]
)
def test_a_model_makes_one_layout_for_all_its_layers(preset: str, made: list[str]) -> None:
    model = build(preset)
    ids = torch.randint(0, 258, (1, 40))
    model(ids)
    model(ids, mask=torch.rand(1, 40) > 0.3, cu_seqlens=torch.tensor([0, 7, 40]))
    assert made == ["make_layout"] * 2
    model.extend(ids, model.init_state(1))
    assert made[2:] == ["stream_layout"]


def test_a_step_of_joined_streams_makes_one_layout(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineartime.layers.flash_stack.native_functions", lambda _: None)  # one function makes its own
    model = build("flash-tiny")
    _, state = model.extend(torch.randint(0, 258, (1, 5)), model.init_state(1))
    streams = model.join_streams([state, model.init_state(1)])
    made.clear()
    model.step(torch.zeros(2, 1, dtype=torch.long), streams)
    assert made == ["step_layout"]


@pytest.mark.parametrize("other", [{"chunk_size": 4}, {"kind": "gau"}])
def test_blocks_with_other_mixers_get_layouts_of_their_own(other: dict[str, Any]) -> None:
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
    first, state = model.extend(ids[:, :20], model.init_state(1))
    torch.testing.assert_close(torch.cat([first, model.extend(ids[:, 20:], state)[0]], 1), whole)


def test_a_layout_of_another_mixer_is_refused() -> None:
    x = torch.randn(1, 12, 16)
    four, eight = (lineartime.FLASH(16, d_qk=8, chunk_size=size) for size in (4, 8))
    with pytest.raises(ValueError, match=r"layout was made for .*chunk_size=8.* but this FLASH needs .*chunk_size=4"):
        four.forward_with_layout(x, eight.layout(x.shape, device=x.device))
