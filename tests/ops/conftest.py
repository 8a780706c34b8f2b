"""What tests of tiled forms share."""

import pytest

from lineartime.native import why_not_native


@pytest.fixture
def compiler() -> None:
    """Skip a test where functions in C++ cannot be built."""
    if why_not_native():
        pytest.skip(f"functions in C++ cannot be built here: {why_not_native()}")
