"""Linear attention: three parallel forms and the streaming form against the definition."""

from collections.abc import Callable

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines.linear import (
    CausalSums,
    LinearState,
    chunked_sums,
    linear_attention,
    linear_attention_extend,
    linear_attention_oracle,
    matmul_sums,
    prefix_sums,
)
from lineartime.errors import ArgumentError


def features(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


@every_pair(length=[1, 128, 130], causal_sums=[chunked_sums, prefix_sums, matmul_sums])  # chunks are 128 long
def test_every_causal_form_is_the_definition(
    length: int, causal_sums: CausalSums, assert_same_function: Callable[..., None]
) -> None:
    assert_same_function(
        lambda q, k, v: linear_attention(q, k, v, causal=True, causal_sums=causal_sums),
        lambda q, k, v: linear_attention_oracle(q, k, v, causal=True),
        *(features(length, width) for width in (4, 4, 5)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_sums_beyond_half_precision_are_those_of_float32(causal: bool) -> None:
    q = k = (8 * torch.rand(1, 1, 4000, 16, generator=torch.Generator().manual_seed(0))).half()
    v = torch.randn(1, 1, 4000, 3, generator=torch.Generator().manual_seed(1)).half()
    found, expected = (linear_attention(*each, causal=causal) for each in ((q, k, v), (q.float(), k.float(), v.float())))
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)
    nothing = torch.zeros(1, 1, 4000, dtype=torch.bool)
    assert torch.equal(linear_attention(q, k, v, causal=causal, real=nothing), torch.zeros_like(v))


@pytest.mark.parametrize("length", [1, 3])
def test_bidirectional_form_is_the_definition(length: int, assert_same_function: Callable[..., None]) -> None:
    assert_same_function(linear_attention, linear_attention_oracle, *(features(length, width) for width in (4, 4, 5)))


@every_pair(gradients=[False, True], rotated=[False, True])
def test_streams_at_different_positions_are_each_the_whole_form(gradients: bool, rotated: bool) -> None:
    """In pieces of which only the first tokens of each stream are real; others are no numbers."""
    pieces = [(5, [5, 2, 0]), (1, [1, 0, 1]), (3, None), (1, None), (130, [130, 1, 0]), (1, [0, 1, 1])]
    total = sum(size for size, _ in pieces)
    inputs = [features(3, 2, total, width).requires_grad_(gradients) for width in (4, 4, 5, 4, 4)]
    real = torch.cat([torch.arange(size) < torch.tensor([size] * 3 if counts is None else counts)[:, None]
                      for size, counts in pieces], 1)  # fmt: skip
    state, outputs, start = LinearState(torch.zeros(3, dtype=torch.long), torch.zeros(3, 2, 4, 6).double()), [], 0
    for size, counts in pieces:
        q, k, v, *plain = (x[:, :, start : start + size] for x in inputs)
        k = k.masked_fill(~real[:, None, start : start + size, None], torch.nan)
        own = {"counts": None if counts is None else torch.tensor(counts), "plain": (plain[0], plain[1]) if rotated else None}
        out, state = linear_attention_extend(q, k, v, state, **own)
        outputs.append(out)
        start += size
    assert torch.equal(state.position, real.sum(1))
    found, direction = torch.cat(outputs, 2), torch.randn(3, 2, total, 5).double()
    for row in range(3):
        q, k, v, *plain = (x[row, :, real[row]] for x in inputs)
        alone = linear_attention(q, k, v, causal=True, plain=(plain[0], plain[1]) if rotated else None)
        own, weights = found[row, :, real[row]], direction[row, :, real[row]]
        torch.testing.assert_close(own, alone, atol=1e-12, rtol=0)
        if gradients:
            wanted = inputs if rotated else inputs[:3]
            results = (torch.autograd.grad((y * weights).sum(), wanted, retain_graph=True) for y in (own, alone))
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_not_real_are_read_by_nobody(causal: bool) -> None:
    q, k, v = (features(2, 1, 9, width) for width in (4, 4, 5))
    real = torch.arange(9) < torch.tensor([[9], [6]])
    out = linear_attention(q, k, v, causal=causal, real=real[:, None])
    alone = linear_attention(q[1:, :, :6], k[1:, :, :6], v[1:, :, :6], causal=causal)
    torch.testing.assert_close(out[1:, :, :6], alone)


def test_states_accumulate_in_float32() -> None:
    # 1 + 1 + ... stops at 256 in bfloat16, which would make the mean of ones larger than one.
    ones = torch.ones(1, 1, 100_000, 1, dtype=torch.bfloat16)
    for sums in (chunked_sums, prefix_sums):
        assert linear_attention(ones, ones, ones, causal=True, causal_sums=sums)[0, 0, -1].item() == pytest.approx(1, abs=0.01)


def test_chunked_form_stores_no_state_for_every_token() -> None:
    # With 64 x 65 numbers for each of 4,096 tokens a gradient would need to keep 68 MB for each head; chunks keep 1/128 of it.
    saved = 0

    def count(x: Tensor) -> Tensor:
        nonlocal saved
        saved += x.numel()
        return x

    q, k, v = (torch.rand(4096, 64, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        linear_attention(q, k, v, causal=True)
    assert saved < 4096 * 64 * 65 / 2


def test_tokens_of_other_streams_than_those_of_the_state_are_refused() -> None:
    q, k, v = make_stream(2)
    _, state = linear_attention_extend(q, k, v, LinearState(torch.zeros(2, dtype=torch.long), torch.zeros(2, 1, 3, 6)))
    for wrong in (1, 3):
        with pytest.raises(ArgumentError, match=r"state needs v of shape \[2, 1, N, 5\], but it is"):
            linear_attention_extend(*make_stream(wrong), state)


def make_stream(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(batch, 1, 4, 3), torch.rand(batch, 1, 4, 3), torch.rand(batch, 1, 4, 5)


@pytest.mark.parametrize(("k", "v"), [((3, 5), (3, 2)), ((5, 4), (3, 2))])
def test_widths_and_lengths_that_do_not_match_are_named(k: tuple[int, int], v: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"^k has shape \[1, ., .\], but must be \[\.\.\., T, f\] to match q \[1, 3, 4\]"):
        linear_attention(features(1, 3, 4), features(1, *k), features(1, *v))
