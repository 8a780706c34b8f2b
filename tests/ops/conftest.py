"""What tests of tiled forms share."""

import pytest

from lineartime.native import why_not_native
from lineartime.ops import mixed_chunk, quadratic


@pytest.fixture(params=["native", "plain"])
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: with what lies between matrix products in C++, and in plain PyTorch."""
    reason = why_not_native()
    if request.param == "plain":
        for module in (mixed_chunk.cpu, quadratic.cpu):
            monkeypatch.setattr(module, "native_functions", lambda source: None)
    elif reason:
        pytest.skip(f"functions in C++ cannot be built here: {reason}")
