"""Tiny models of transformers, of every system."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from lineartime.hf import LineartimeConfig, LineartimeForCausalLM
from lineartime.models.systems import SIZED

Model = TypeVar("Model", bound=nn.Module)
Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

SMALL: dict[str, Any] = {"d_qk": 8, "n_heads": 2, "chunk_size": 8}
SHIFTED = "flash-next"
"""The system that has a token shift in these tests, so that its states are among those that are cached."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    """No progress bars, and no warnings."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


@pytest.fixture
def checkpointing() -> str:
    """What transformers calls computing blocks again: activation checkpointing since 5.23."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next(name for name in names if hasattr(PreTrainedModel, f"{name}_enable"))


@pytest.fixture
def tiny() -> Tiny:
    """`tiny("flash", n_blocks=1)`: the configuration of a tiny model of that system."""

    def make(system: str = "flash", task: Any = "clm", **overrides: Any) -> LineartimeConfig:
        preset = LineartimeConfig.from_preset(f"{system}-tiny", task)
        options = {name: SMALL[name] for name in SIZED if name in preset.mixer}
        if system == "mhsa-single-head":
            del options["n_heads"]
        if system == SHIFTED:
            options["token_shift"] = True
        sizes = {"d_model": 16, "n_blocks": 2, "vocab_size": 40, **options, **overrides}
        return LineartimeConfig.from_preset(f"{system}-tiny", task, **sizes)

    return make


@pytest.fixture
def awake() -> Awake:
    """`awake(model)`: the model in evaluation mode with weights far from their small initial values, so that all have a say."""

    def wake(model: Model) -> Model:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()

    return wake


@pytest.fixture
def causal(tiny: Tiny, awake: Awake) -> LineartimeForCausalLM:
    """A causal language model of FLASH."""
    return awake(LineartimeForCausalLM(tiny()))
