"""Linformer: the parallel form against the definition, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime.baselines.linformer import Linformer, linformer_attention, linformer_attention_oracle

LENGTHS = [0, 1, 3, 4, 5, 17]
LANDMARKS, MAX_LENGTH = 3, 17


def definition(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor, lengths: list[int]) -> Tensor:
    """The oracle for every row, of so many tokens, and every head of it."""
    out = torch.zeros_like(v)
    for row, tokens in enumerate(lengths):
        for head in range(v.shape[1] if tokens else 0):
            out[row, head, :tokens] = linformer_attention_oracle(*(x[row, head, :tokens] for x in (q, k, v)), e, f)
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients_are_those_of_the_definition(length: int) -> None:
    lengths = [length, length // 2]
    real = (torch.arange(length) < torch.tensor(lengths)[:, None])[:, None, :, None]
    tokens = [torch.randn(2, 2, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mixes = [torch.randn(LANDMARKS, MAX_LENGTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    inputs, direction = [*(x * real for x in tokens), *mixes], torch.randn(2, 2, length, 6, dtype=torch.float64)
    fast, exact = linformer_attention(*inputs) * real, definition(*inputs, lengths)
    torch.testing.assert_close(fast, exact, atol=1e-10, rtol=0)
    if length:
        leaves = [*tokens, *mixes]
        gradients = [torch.autograd.grad((out * direction).sum(), leaves, retain_graph=True) for out in (fast, exact)]
        for of_fast, of_exact in zip(*gradients, strict=True):
            torch.testing.assert_close(of_fast, of_exact, atol=1e-10, rtol=0)


def test_a_landmark_starts_about_as_large_as_a_token() -> None:
    layer = Linformer(16, n_heads=2, n_landmarks=200, max_length=400)
    for mix in (layer.mix_keys, layer.mix_values):
        landmarks = mix @ torch.randn(400, 50)
        assert 0.9 < landmarks.std() < 1.1


@pytest.mark.parametrize("packed", [False, True])
def test_only_the_longest_sequence_has_to_fit(packed: bool) -> None:
    layer = Linformer(16, n_heads=2, n_landmarks=3, max_length=8)
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 1, 10])} if packed else {}
    with pytest.raises(ValueError, match="max_length is 8 in this Linformer, but the sequence has 9 tokens"):
        layer(torch.zeros(1, 10 if packed else 9, 16), **options)
    assert layer(torch.zeros(1, 10, 16), cu_seqlens=torch.tensor([0, 2, 10])).shape == (1, 10, 16)
