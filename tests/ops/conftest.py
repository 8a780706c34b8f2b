"""What tests of tiled forms share."""

import pytest

from lineartime.native import why_not_native
from lineartime.ops.mixed_chunk import tile_native
from lineartime.ops.quadratic import tile_work


@pytest.fixture(params=["native", "plain"])
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: with what lies between matrix products in C++, and in plain PyTorch."""
    reason = why_not_native()
    if request.param == "plain":
        for module in (tile_native, tile_work):
            monkeypatch.setattr(module, "native_functions", lambda source: None)
    elif reason:
        pytest.skip(f"functions in C++ cannot be built here: {reason}")
