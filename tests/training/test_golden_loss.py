"""Golden loss curves: any change in the maths of a model, its loss or its gradients changes a curve.

If a change is meant to alter the curves, write them again and say why in the commit:

    python tests/training/test_golden_loss.py --write
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lineartime

FILE = Path(__file__).parents[1] / "assets" / "golden_loss.json"
PRESETS = ("flash-tiny", "flash-quad-tiny", "transformer++-tiny")
STEPS = 20
TOKENS = 300  # of a step: two chunks of FLASH and a part of a third
TOLERANCE = 2e-5
"""Nats. Thread counts, instruction sets (SSE, AVX2, AVX-512) and forms of the operations move a loss by up to 1e-6. Small
mistakes move the curve by far more: scores scaled by 1% by 8e-4 to 3e-3, no relative bias or another divisor by 6e-1."""


def loss_curve(preset: str) -> list[float]:
    """The loss of every step in nats, each on another piece of a small text."""
    text = " ".join(f"{i} squared is {i * i}, and {i} cubed is {i**3}." for i in range(300))
    ids = torch.tensor(list(text.encode("ascii")))
    # Weights are drawn below; gammas of 1 would be drawn around 1, where scores weigh more than all else.
    drawn: dict[str, Any] = {"initial_scores": "small"} if preset == "flash-quad-tiny" else {}
    model = lineartime.build(preset, vocab_size=128, **drawn)
    draw_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        window = ids[step * TOKENS : (step + 1) * TOKENS + 1][None]
        loss = model.loss(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw_weights(model: nn.Module) -> None:
    """Draw each parameter from its name, so that the order in which a model creates them does not matter.

    The weights are larger than those a model starts with: scores, biases and gates then weigh enough in the loss for a
    mistake in any of them to show. Parameters that start as constants are drawn around these constants.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        first = parameter.detach().flatten()[0]
        centre = first if bool((parameter == first).all()) else torch.zeros(())
        is_matrix = name.endswith("weight") and parameter.dim() == 2
        std = parameter.shape[-1] ** -0.5 if is_matrix else 0.3
        parameter.data.copy_(centre + std * noise)


@pytest.mark.parametrize("preset", PRESETS)
def test_training_follows_the_golden_loss_curve(preset: str) -> None:
    golden = json.loads(FILE.read_text())[preset]
    assert len(golden) == STEPS
    assert loss_curve(preset) == pytest.approx(golden, abs=TOLERANCE, rel=0)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    curves = {preset: [round(loss, 6) for loss in loss_curve(preset)] for preset in PRESETS}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(curves, indent=1) + "\n")
