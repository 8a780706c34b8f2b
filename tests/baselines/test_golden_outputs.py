"""Golden outputs of the nine baselines that replace a step of GAU or FLASH, in float64, as commit e1531443 computes them.

The layers may be written in another way; what they compute stays.
"""

import json
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lineartime import baselines
from lineartime.layers import FLASH, Mixer

FILE = Path(__file__).parents[1] / "assets" / "golden_baselines.json"
LAYERS: dict[str, type[Mixer]] = {
    "flash-parts": FLASH,  # the class of that time had the same function
    **{
        layer.name: layer
        for layer in (
            baselines.FLASHCLS, baselines.FLASHFirstToAll, baselines.FLASHGlobal, baselines.FLASHLocal,
            baselines.FLASHOverlapping, baselines.FLASHWeighted, baselines.GAUMultiHead, baselines.GAUUngated,
        )
    },
}  # fmt: skip
CASES = [(name, causal) for name, layer in LAYERS.items() for causal in (False, True) if not causal or not layer.why_not_causal]
T = 21


def drawn(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64)


def outputs(name: str, causal: bool) -> dict[str, list[float]]:
    """Some outputs of a row, a padded row, a pack and a stream, and the norm of each parameter's gradient."""
    sizes = {} if name.startswith("gau") else {"chunk_size": 4}
    layer = LAYERS[name](8, d_qk=8, causal=causal, **sizes).double()
    for key, parameter in layer.named_parameters():
        parameter.data.copy_(0.5 * drawn(key, *parameter.shape))
    x = drawn("x", 2, T, 8)
    mask = torch.arange(T) < torch.tensor([[T], [T - 6]])
    y = layer(x)
    (y * drawn("direction", *y.shape)).sum().backward()
    found = {
        "rows": y[:, ::5].flatten(),
        "padded": layer(x, mask=mask)[1, ::5].flatten(),
        "pack": layer(x[:1], cu_seqlens=torch.tensor([0, 7, 7, 16, T]))[0, ::5].flatten(),
        "gradients": torch.stack([p.new_zeros(()) if p.grad is None else p.grad.norm() for p in layer.parameters()]),
    }
    if causal:
        first, state = layer.extend(x[:, :9])
        found["stream"] = torch.cat([first, layer.extend(x[:, 9:], state)[0]], 1)[:, ::5].flatten()
    return {key: [round(value, 9) for value in values.tolist()] for key, values in found.items()}


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_baseline_that_replaces_a_step_computes_what_it_did(name: str, causal: bool) -> None:
    golden, found = json.loads(FILE.read_text())[f"{name}{' causal' * causal}"], outputs(name, causal)
    assert found.keys() == golden.keys()
    for key, values in golden.items():
        assert found[key] == pytest.approx(values, abs=2e-8, rel=1e-8), key
