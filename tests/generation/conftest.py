"""Small models of every kind of state."""

from collections.abc import Callable

import pytest
import torch

import lineartime
from lineartime.models import CausalLM

Build = Callable[[str], CausalLM]
SMALL = {"d_qk": 8, "n_heads": 2, "chunk_size": 16}


@pytest.fixture
def awake() -> Build:
    """Builds a small model in float64 whose mixers change the logits, by the name of a preset, and "shifted" or "prefix-lm"."""

    def build(name: str) -> CausalLM:
        preset, *more = name.split()
        known = lineartime.presets()[preset]
        size = {option: value for option, value in SMALL.items() if option in known.override_names}
        task = "prefix-lm" if "prefix-lm" in more else "clm"
        options = {"d_model": 16, "n_blocks": max(2, len(known.mixers)), "vocab_size": 40, **size}
        model = lineartime.build(preset, task, token_shift="shifted" in more, **options).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    return build


@pytest.fixture
def model(awake: Build, request: pytest.FixtureRequest) -> CausalLM:
    """A small model of FLASH, or of the system that an indirect parameter names."""
    return awake(getattr(request, "param", "flash-tiny"))
