"""Apple's GPUs have no float64: nothing on a device without it may make such a tensor.

The meta device stands for one: its tensors have no values, but devices and dtypes.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lineartime.choices import Task
from lineartime.models import build
from lineartime.ops import positions
from lineartime.ops.positions import rotary_table, sinusoid

META = torch.device("meta")
SYSTEMS = ["flash", "flash-quad", "transformer", "transformer++", "performer", "cosformer", "mixed-chunk", "linformer"]
"""One of each kind of positions, norms and sums."""


class WithoutFloat64(TorchDispatchMode):
    """Fails as soon as an operation makes or takes a float64 tensor on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device == META:
                assert leaf.dtype not in (torch.float64, torch.complex128), f"{func} has a float64 tensor"
        return out


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(positions, "has_float64", lambda device: device != META)
    yield
    positions._digit_tables.cache_clear()


@pytest.mark.parametrize("system", SYSTEMS)
def test_training_and_streaming_make_no_float64(system: str, without_float64: None) -> None:
    task: Task = "mlm" if system == "linformer" else "clm"
    model = build(f"{system}-tiny", task, n_blocks=1).to(META)  # type: ignore[call-overload]
    ids = torch.zeros(2, 150, dtype=torch.long, device=META)
    with WithoutFloat64():
        model.loss(ids, ids).backward()
        if task == "clm":
            _, state = model.extend(ids, model.init_state(2))
            model.extend(ids[:, :3], state)


def test_rotations_without_float64_are_exact_at_long_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.tensor([[0, 1, 1023, 1024], [99_999, 100_000, 2**20 + 7, 2**30 - 1]])
    exact = rotary_table(where, 64, torch.float64), sinusoid(where, 128, torch.float64)
    monkeypatch.setattr(positions, "has_float64", lambda device: False)
    found = rotary_table(where, 64, torch.float32), sinusoid(where, 128, torch.float32)
    for table, wanted in zip(found, exact, strict=True):
        assert table.dtype == torch.float32
        torch.testing.assert_close(table.double(), wanted, atol=1e-6, rtol=0)
