"""Packs in parts: which documents are read together, and that the parts of an attention are the attention."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lineartime.ops import make_layout as maker
from lineartime.ops import packs
from lineartime.ops.layout import LayoutPlan
from lineartime.ops.make_layout import make_layout
from lineartime.ops.mixed_chunk import gated_mixed_chunk_attention, mixed_chunk_attention
from lineartime.ops.packs import GROUP_COST, MAX_GROUPS, similar_documents
from lineartime.ops.positions import FactoredBias
from lineartime.ops.quadratic import quadratic_attention

ENDS = [0, 3, 3, 25, 27, 46, 47, 80]
LENGTH = ENDS[-1]


@pytest.fixture
def small_parts() -> Iterator[None]:
    with patch.object(packs, "GROUP_COST", 0), patch.object(packs, "WASTE", 100), patch.object(maker, "MIN_CHUNK_SIZE", 1):
        yield


def cost(documents: int, longest: int) -> int:
    return documents * longest * (longest + packs.SLOT_COST)


@given(st.lists(st.integers(0, 20) | st.integers(0, 3000), max_size=300))
def test_groups_are_few_hold_each_document_once_and_bound_the_padding(lengths: list[int]) -> None:
    groups = similar_documents(lengths)
    assert len(groups) <= MAX_GROUPS
    assert sorted(document for group in groups for document in group) == [i for i, tokens in enumerate(lengths) if tokens]
    padded = sum(cost(len(group), max(lengths[i] for i in group)) for group in groups)
    # Lengths of one group by powers of two are a factor of 2 apart, scores one of 4; joining groups adds a quarter, or little.
    # A search for lengths that cost most found 4.54.
    assert padded <= 5 * sum(cost(1, tokens) for tokens in lengths) + 12 * GROUP_COST


ARTICLES = [512, 37, 52, 2048, 60, 64, 71, 300, 80, 95, 110, 900, 128, 130, 140, 155, 410, 180, 200, 256]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        (ARTICLES, [(15, 37, 256), (3, 300, 512), (1, 900, 900), (1, 2048, 2048)]),
        ([30] * 400 + [8192] + [65] * 200 + [500] * 30, [(600, 30, 65), (30, 500, 500), (1, 8192, 8192)]),
        ([700] * 40 + [9] * 999 + [3000] * 3 + [150] * 300, [(999, 9, 9), (300, 150, 150), (40, 700, 700), (3, 3000, 3000)]),
    ],
    ids=["articles", "a book among notes", "pages of the web"],
)
def test_groups_of_usual_packs_are_these(lengths: list[int], expected: list[tuple[int, int, int]]) -> None:
    """The number of documents of each group, and the lengths of its shortest and longest."""
    groups = [[lengths[document] for document in group] for group in similar_documents(lengths)]
    assert [(len(group), min(group), max(group)) for group in groups] == expected


@pytest.mark.parametrize("lengths", [[128] * 64, [100, 120] * 200, [5, 35], [7], [0, 9, 0], [0, 0], []])
def test_documents_of_similar_length_and_small_packs_stay_one_group(lengths: list[int]) -> None:
    assert len(similar_documents(lengths)) <= 1


@pytest.mark.parametrize(
    "lengths",
    [[1] * 2999 + [3001], [2] * 500 + [900, 1000], [1] * 2000 + [30] * 300 + [4000], [0] * 1000 + [512] + [3] * 2000],
)
def test_a_long_document_is_not_what_short_ones_are_padded_to(lengths: list[int]) -> None:
    groups = similar_documents(lengths)
    slots = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert slots <= 2 * sum(lengths)


def test_the_parts_of_a_pack_hold_its_tokens_in_order(small_parts: None) -> None:
    made = make_layout((1, LENGTH), None, torch.tensor(ENDS), device=torch.device("cpu"), plan=LayoutPlan(chunk_size=64))
    assert made.parts is not None
    assert sorted(made.parts.tokens.tolist()) == list(range(LENGTH))
    first, *_ = made.parts.layouts
    assert made.parts.tokens[: made.parts.sizes[0]].tolist() == [25, 26, 46]  # the documents of 2 and 1 tokens
    assert first.positions.tolist() == [0, 1, 0]
    assert [part.require_chunks().chunk_size for part in made.parts.layouts] == [2, 4, 32, 64]
    x = torch.randn(1, LENGTH, 3)
    assert torch.equal(made.by_part(lambda tokens, part: tokens + part.positions[:, None], x), x + made.positions[:, None])


def agree(attend: Any, heads: list[Tensor], **options: Any) -> None:
    """Values and gradients of the pack in parts are those of the pack as one."""
    heads = [x.requires_grad_() for x in heads]
    whole = attend(*heads, cu_seqlens=torch.tensor(ENDS), **options)
    with patch.object(packs, "GROUP_COST", 0), patch.object(packs, "WASTE", 100), patch.object(maker, "MIN_CHUNK_SIZE", 1):
        parts = attend(*heads, cu_seqlens=torch.tensor(ENDS), **options)
    torch.testing.assert_close(parts, whole, atol=1e-10, rtol=1e-10)
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), heads) for out in (parts, whole)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


MASK = (torch.arange(LENGTH) % 5 != 2)[None]
PREFIXES = torch.tensor([2, 0, 9, 0, 10, 0, 4])


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("prefix_lengths", [None, PREFIXES])
@pytest.mark.parametrize("factored", [False, True])
def test_quadratic_attention_reads_a_pack_in_parts(mask: Any, prefix_lengths: Any, factored: bool) -> None:
    bias = FactoredBias(random(LENGTH, 4), random(LENGTH, 4)) if factored else random(LENGTH, LENGTH)
    heads = [random(1, LENGTH, 4), random(1, LENGTH, 4), random(1, LENGTH, 6)]
    agree(quadratic_attention, heads, causal=True, bias=bias, mask=mask, prefix_lengths=prefix_lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalization", ["count", "paper"])
@pytest.mark.parametrize("backend", ["torch", "oracle"])
def test_mixed_chunk_attention_reads_a_pack_in_parts(causal: bool, normalization: str, backend: str) -> None:
    heads = [*(random(1, LENGTH, 4) for _ in range(4)), random(1, LENGTH, 6)]
    options = {"mask": MASK, "prefix_lengths": PREFIXES if causal else None, "backend": backend, "normalization": normalization}
    agree(mixed_chunk_attention, heads, chunk_size=20, causal=causal, bias=random(20, 20), **options)


@pytest.mark.parametrize("normalization", ["count", "paper", "paper_sum"])
@pytest.mark.parametrize("backend", ["torch", "tiled"])
def test_gated_mixed_chunk_attention_reads_a_pack_in_parts(normalization: str, backend: str) -> None:
    inputs = [random(1, LENGTH, 16), random(4, 4), random(4, 4)]
    positions = make_layout((1, LENGTH), None, torch.tensor(ENDS), device=torch.device("cpu")).positions
    options = {"normalization": normalization, "backend": backend, "positions": positions}
    agree(gated_mixed_chunk_attention, inputs, chunk_size=20, causal=True, bias=random(20, 20), **options)
