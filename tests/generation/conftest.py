"""Small models of every kind of state."""

from collections.abc import Callable
from typing import Any

import pytest

import lineartime
from lineartime.models import CausalLM

Build = Callable[[str], CausalLM]


@pytest.fixture
def awake(tiny: Callable[..., Any]) -> Build:
    """Builds a small model in float64 whose mixers change the logits, by the name of a system, and "shifted" or "prefix-lm"."""

    def build(name: str) -> CausalLM:
        system, *more = name.split()
        n_blocks = max(2, len(lineartime.presets()[f"{system}-tiny"].mixers))
        options = {"n_blocks": n_blocks, "vocab_size": 40, "token_shift": "shifted" in more}
        model: CausalLM = tiny(system, "prefix-lm" if "prefix-lm" in more else "clm", noise=0.3, **options)
        return model.double().eval()

    return build


@pytest.fixture
def model(awake: Build, request: pytest.FixtureRequest) -> CausalLM:
    """A small model of FLASH, or of the system that an indirect parameter names."""
    return awake(getattr(request, "param", "flash"))
