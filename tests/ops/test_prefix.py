"""Prefixes in FLASH's and GAU's attention: every form against a definition that goes pair by pair."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops import FactoredBias, mixed_chunk_attention, quadratic_attention
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.mixed_chunk import gated_mixed_chunk_attention
from lineartime.ops.positions import rotary_table

CHUNK, LENGTH, BATCH = 4, 14, 4
Check = Callable[..., None]


def lengths_of(mask: Tensor | None) -> Tensor:
    """Nothing, within a chunk, across chunks, and all of a row."""
    real = torch.full((BATCH,), LENGTH) if mask is None else mask.sum(1)
    return torch.minimum(torch.tensor([0, 3, 9, LENGTH]), real)


def make_mask(kind: str) -> Tensor | None:
    tokens, padding = torch.arange(LENGTH).expand(BATCH, -1), torch.tensor([[0], [2], [5], [1]])
    return {"none": None, "left": tokens >= padding, "right": tokens < LENGTH - padding, "holes": tokens % 3 != padding % 3}[
        kind
    ]


def inputs_of(maps: int, batch: int = BATCH, length: int = LENGTH) -> list[Tensor]:
    return [torch.randn(batch, length, width, dtype=torch.float64) for width in [6] * maps + [5]]


def forms(op: Any, backend: str, **options: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """An op with a bias as its last input: by a backend, and by its definition."""

    def run(chosen: str, *inputs: Tensor) -> Tensor:
        return op(*inputs[:-1], bias=inputs[-1], causal=True, backend=chosen, **options)

    return lambda *inputs: run(backend, *inputs), lambda *inputs: run("oracle", *inputs)


@every_pair(mask_kind=["none", "left", "right", "holes"], activation=ACTIVATIONS, normalization=["count", "paper", "paper_sum"])
def test_mixed_chunks_are_their_definition(
    mask_kind: str, activation: str, normalization: str, assert_same_function: Check
) -> None:
    mask = make_mask(mask_kind)
    options = {"chunk_size": CHUNK, "mask": mask, "prefix_lengths": lengths_of(mask), "activation": activation}
    fast, oracle = forms(mixed_chunk_attention, "torch", normalization=normalization, **options)
    assert_same_function(fast, oracle, *inputs_of(4), torch.randn(CHUNK, CHUNK))


@every_pair(mask_kind=["none", "left", "right", "holes"], activation=ACTIVATIONS, normalization=["count", 7])
def test_quadratic_attention_is_its_definition(
    mask_kind: str, activation: str, normalization: str | int, assert_same_function: Check
) -> None:
    mask = make_mask(mask_kind)
    options = {"mask": mask, "prefix_lengths": lengths_of(mask), "activation": activation, "normalization": normalization}
    for backend in ("torch", "tiled") if activation == "relu2" else ("torch",):
        assert_same_function(*forms(quadratic_attention, backend, **options), *inputs_of(2), torch.randn(LENGTH, LENGTH))


def test_definition_of_quadratic_attention_is_the_mask_of_a_prefix_model() -> None:
    q, k, v = inputs_of(2)
    lengths = lengths_of(None)
    out = quadratic_attention(q, k, v, causal=True, prefix_lengths=lengths, activation="softmax", backend="oracle")
    t, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    visible = (j <= t) | ((t < lengths[:, None, None]) & (j < lengths[:, None, None]))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(out, exact, atol=1e-12, rtol=0)


PACK, PREFIXES = torch.tensor([0, 5, 5, 9, 14]), torch.tensor([3, 0, 4, 1])


@pytest.mark.parametrize("padded", [False, True])
def test_each_document_of_a_pack_has_a_prefix_of_its_own(padded: bool, assert_same_function: Check) -> None:
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    mask[0, [1, 10]] = not padded
    options = {"mask": mask, "cu_seqlens": PACK, "prefix_lengths": PREFIXES}
    fast, oracle = forms(mixed_chunk_attention, "torch", chunk_size=CHUNK, **options)
    assert_same_function(fast, oracle, *inputs_of(4, 1), torch.randn(CHUNK, CHUNK))
    for backend in ("torch", "tiled"):
        fast, oracle = forms(quadratic_attention, backend, **options)
        assert_same_function(fast, oracle, *inputs_of(2, 1), torch.randn(LENGTH, LENGTH))
    inputs, bias = inputs_of(2, 1), torch.randn(LENGTH, LENGTH).double()
    packed = quadratic_attention(*inputs, causal=True, bias=bias, **options)
    for (start, stop), length in zip(pairwise(PACK.tolist()), PREFIXES.tolist(), strict=True):
        alone = [x[:, start:stop] for x in inputs]
        size = stop - start
        row = {"mask": mask[:, start:stop], "prefix_lengths": torch.tensor([length]), "bias": bias[:size, :size]}
        torch.testing.assert_close(packed[:, start:stop], quadratic_attention(*alone, causal=True, **row), atol=1e-12, rtol=0)


@every_pair(backend=["torch", "tiled"], normalization=["count", "paper"], rope=[False, True])
def test_gated_forms_are_their_definition(backend: str, normalization: str, rope: bool, assert_same_function: Check) -> None:
    mask = make_mask("left")
    positions = torch.arange(LENGTH) if rope else None

    def run(chosen: Any, projected: Tensor, gamma: Tensor, beta: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"mask": mask, "prefix_lengths": lengths_of(mask), "normalization": normalization}
        return gated_mixed_chunk_attention(
            projected, gamma, beta, chunk_size=CHUNK, positions=positions, causal=True, bias=bias, backend=chosen, **options
        )

    inputs = torch.randn(BATCH, LENGTH, 16), torch.randn(4, 6), torch.randn(4, 6), torch.randn(CHUNK, CHUNK)
    assert_same_function(lambda *x: run(backend, *x), lambda *x: run("oracle", *x), *inputs)


def test_prefix_of_nothing_is_causal_attention_to_the_bit_and_one_of_everything_reads_both_ways() -> None:
    heads, qkv = inputs_of(4), inputs_of(2)
    factors = FactoredBias(*rotary_table(torch.arange(LENGTH), 4, torch.float64))
    for op, inputs, options in (
        (mixed_chunk_attention, heads, {"chunk_size": CHUNK}),
        (quadratic_attention, qkv, {"bias": factors}),
    ):
        causal = op(*inputs, causal=True, **options)
        assert torch.equal(op(*inputs, causal=True, prefix_lengths=torch.zeros(BATCH, dtype=torch.long), **options), causal)
        whole = op(*inputs, causal=True, prefix_lengths=torch.full((BATCH,), LENGTH), **options)
        torch.testing.assert_close(whole, op(*inputs, **options), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_lengths": [1, 2]}, "prefix_lengths is a list, but must be a tensor"),
        (
            {"prefix_lengths": torch.tensor([1, 4]), "mask": torch.tensor([[True] * 5, [False, True, True, True, False]])},
            r"prefix_lengths is \[1, 4\], but must be from 0 to the number of real tokens of each row",
        ),
        ({"prefix_lengths": torch.tensor([1, 1]), "causal": False}, "only causal attention has prefixes: use causal=True"),
    ],
)
def test_wrong_prefix_lengths_are_named(options: dict[str, Any], message: str) -> None:
    for op, maps, more in ((mixed_chunk_attention, 4, {"chunk_size": CHUNK}), (quadratic_attention, 2, {})):
        with pytest.raises(ArgumentError, match=message):
            op(*inputs_of(maps, 2, 5), **{"causal": True, **more, **options})
    q, k, v = inputs_of(2, 1, 5)
    with pytest.raises(ArgumentError, match=r"prefix_lengths has shape \[1\], but must be \[D\] = \[2\]"):
        quadratic_attention(q, k, v, causal=True, cu_seqlens=torch.tensor([0, 2, 5]), prefix_lengths=torch.tensor([1]))
    with pytest.raises(ArgumentError, match="is 'paper', which would use a different divisor inside and after the prefix"):
        quadratic_attention(q, k, v, causal=True, normalization="paper", prefix_lengths=torch.tensor([1]))
