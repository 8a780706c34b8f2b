"""Apple's GPUs have no float64: nothing on a device without it may make such a tensor.

The meta device stands for one: its tensors have no values, but devices and dtypes.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lineartime.choices import Task
from lineartime.models import build
from lineartime.ops import positions

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


@pytest.mark.parametrize("system", SYSTEMS)
def test_training_and_streaming_make_no_float64(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "_rotary_table", positions._fake_table)  # Apple's GPUs get it from the CPU
    task: Task = "mlm" if system == "linformer" else "clm"
    model = build(f"{system}-tiny", task, n_blocks=1).to(META)  # type: ignore[call-overload]
    ids = torch.zeros(2, 150, dtype=torch.long, device=META)
    with WithoutFloat64():
        model.loss(ids, ids).backward()
        if task == "clm":
            _, state = model.extend(ids, model.init_state(2))
            model.extend(ids[:, :3], state)
