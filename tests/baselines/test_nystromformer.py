"""Nyströmformer: the parallel form against the definition, its pseudo-inverse and convolution, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lineartime.baselines.nystromformer import (
    Nystromformer,
    convolution_oracle,
    nystromformer_attention_oracle,
    pseudo_inverse,
)

LANDMARKS = 4


@pytest.mark.parametrize("lengths", [[1, 1], [4, 3], [5, 3], [7, 5], [17, 8], [18, 0]])
@pytest.mark.parametrize("convolution", [0, 5])
def test_values_and_gradients_are_those_of_the_definition(
    lengths: list[int], convolution: int, assert_same_function: Callable[..., None]
) -> None:
    layer = Called(Nystromformer(12, n_heads=2, n_landmarks=LANDMARKS, convolution=convolution))
    real = torch.arange(lengths[0]) < torch.tensor(lengths)[:, None]
    tokens = real[:, None, :, None]

    def fast(kernel: Tensor, *inputs: Tensor) -> Tensor:
        out = functional_call(layer, {"layer.kernel": kernel[:, :convolution]}, (*(x * tokens for x in inputs), real))
        return torch.as_tensor(out * tokens)

    def definition(kernel: Tensor, *inputs: Tensor) -> Tensor:
        rows = []
        for row, n in enumerate(lengths):
            heads = []
            for head in range(2 if n else 0):
                q, k, v = (x[row, head, :n] for x in inputs)
                out = nystromformer_attention_oracle(q, k, v, n_landmarks=LANDMARKS)
                heads.append(out + convolution_oracle(v, kernel[head, :convolution]) if convolution else out)
            padded = [F.pad(out, (0, 0, 0, lengths[0] - n)) for out in heads]
            rows.append(torch.stack(padded) if n else torch.zeros_like(inputs[0][row]))
        return torch.stack(rows)

    inputs = (torch.randn(2, 2, lengths[0], 6) for _ in range(3))
    assert_same_function(fast, definition, torch.randn(2, 5), *inputs)


class Called(nn.Module):
    """A layer whose call is its attention."""

    def __init__(self, layer: Nystromformer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Tensor:
        return self.layer.attend(*inputs)


def test_the_iterations_end_at_the_pseudo_inverse() -> None:
    a = (2 * torch.eye(8, dtype=torch.float64) + torch.randn(3, 2, 8, 8, dtype=torch.float64)).softmax(-1)
    a = (a + torch.eye(8)) / 2
    torch.testing.assert_close(pseudo_inverse(a), torch.linalg.pinv(a), atol=1e-6, rtol=0)


def test_the_inverse_of_a_row_does_not_depend_on_the_batch() -> None:
    a = torch.rand(3, 4, 4)
    torch.testing.assert_close(pseudo_inverse(a)[1], pseudo_inverse(a[1]))


def test_no_more_tokens_than_landmarks_are_softmax_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, LANDMARKS, 6)
    layer = Nystromformer(12, n_heads=2, n_landmarks=LANDMARKS, convolution=0)
    torch.testing.assert_close(layer.attend(q, k, v, None), F.scaled_dot_product_attention(q, k, v))


def test_a_segment_of_equal_tokens_for_every_landmark_is_softmax_attention_too() -> None:
    q, k, v = torch.randn(3, 1, 2, LANDMARKS, 6, dtype=torch.float64).unbind(0)
    q, k = (3 * F.normalize(torch.eye(6, dtype=torch.float64)[:LANDMARKS], dim=-1).expand_as(x) + 0.3 * x for x in (q, k))
    q, k, v = (x.repeat_interleave(5, 2) for x in (q, k, v))
    layer = Nystromformer(12, n_heads=2, n_landmarks=LANDMARKS, convolution=0)
    torch.testing.assert_close(layer.attend(q, k, v, None), F.scaled_dot_product_attention(q, k, v), atol=1e-2, rtol=0)
