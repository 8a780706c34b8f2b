"""What tests of tiled forms share."""

import pytest

from lineartime.native import why_not_native
from lineartime.ops.mixed_chunk import cpu_tiles
from lineartime.ops.quadratic import cpu


@pytest.fixture(params=["native", "plain"])
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: with what lies between matrix products in C++, and in plain PyTorch."""
    reason = why_not_native()
    if request.param == "plain":
        for module in (cpu_tiles, cpu):
            monkeypatch.setattr(module, "native_functions", lambda source: None)
    elif reason:
        pytest.skip(f"functions in C++ cannot be built here: {reason}")
