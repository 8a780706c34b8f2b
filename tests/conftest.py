from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from lineartime.training.config import TrainConfig

settings.register_profile("deterministic", derandomize=True)
settings.load_profile("deterministic")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text with something to learn in it."""
    file = tmp_path / "text.txt"
    file.write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(400)))
    return file


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Options of a run of a second: `config(steps=3)`."""

    def make(**options: Any) -> TrainConfig:
        defaults: dict[str, Any] = {
            "override": ("d_model=16", "n_blocks=2", "d_qk=8", "chunk_size=8"),
            "data": text,
            "context_length": 24,
            "batch_size": 2,
            "steps": 6,
            "eval_every": 2,
            "eval_windows": 4,
            "precision": "fp32",
            "cache": tmp_path / "cache",
            "out": tmp_path / "run",
        }
        return TrainConfig(**{**defaults, **options})

    return make
