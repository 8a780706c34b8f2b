"""What tests of tiled forms share."""

import pytest

from lineartime.native import why_not_native
from lineartime.ops import quadratic


@pytest.fixture(params=["native", "plain"])
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test of quadratic attention twice: with what lies between matrix products in C++, and in plain PyTorch."""
    if request.param == "plain":
        monkeypatch.setattr(quadratic, "native_functions", lambda source, dtype: None)
    else:
        request.getfixturevalue("compiler")


@pytest.fixture
def compiler() -> None:
    """Skip a test where functions in C++ cannot be built."""
    if why_not_native():
        pytest.skip(f"functions in C++ cannot be built here: {why_not_native()}")
