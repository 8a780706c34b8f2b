from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.fixture
def assert_heads_are_the_definition(assert_same_function: Callable[..., None]) -> Callable[..., None]:
    """`assert_heads_are_the_definition(attend, oracle, *inputs)`: each head of each row is the oracle of its own real tokens.

    Inputs are [2, H, L, h]; the second row is half padding. `attend` takes them, zero at padding, and `real`, [2, L]; `oracle`
    takes the number of the head and its tokens [n, h]. In float64, values and all gradients agree.
    """

    def check(attend: Callable[..., Tensor], oracle: Callable[..., Tensor], *inputs: Tensor) -> None:
        heads, length = inputs[0].shape[1:3]
        lengths = [length, (length + 1) // 2]
        real = torch.arange(length) < torch.tensor(lengths)[:, None]
        tokens = real[:, None, :, None]

        def fast(*inputs: Tensor) -> Tensor:
            return attend(*(x * tokens for x in inputs), real) * tokens

        def definition(*inputs: Tensor) -> Tensor:
            rows = [
                torch.stack([oracle(head, *(x[row, head, :n] for x in inputs)) for head in range(heads)])
                for row, n in enumerate(lengths)
            ]
            return torch.stack([F.pad(row, (0, 0, 0, length - row.shape[1])) for row in rows])

        assert_same_function(fast, definition, *inputs)

    return check
