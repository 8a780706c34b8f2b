"""What tests of tiled forms share."""

from collections.abc import Iterator

import pytest
import torch

from lineartime.native import why_not_native


@pytest.fixture
def compiler() -> None:
    """Skip a test where functions in C++ cannot be built."""
    if why_not_native():
        pytest.skip(f"functions in C++ cannot be built here: {why_not_native()}")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """PyTorch's deterministic mode, in which memory that nobody has written to is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
