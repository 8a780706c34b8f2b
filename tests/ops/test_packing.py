"""Where tokens stand, against what it means spelt out document by document."""

from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.definitions import assert_same_with_gradients
from tests.ops import cases
from tests.pairs import every_pair
from torch import Tensor

from lineartime import FLASH
from lineartime.errors import LineartimeError
from lineartime.ops import packing as packings
from lineartime.ops.packing import GROUP_COST, MAX_GROUPS, Packing, similar_documents
from lineartime.ops.packing import describe as describe_on

CPU = torch.device("cpu")
ENDS = [0, 3, 3, 25, 27, 46, 47, 80]
MASK = torch.arange(ENDS[-1]) % 5 != 2
HOLES = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 1]]).bool()


def describe(*shape: int, **options: Any) -> Packing:
    return describe_on(shape, device=CPU, **options)


def pack_of(ends: list[int], **options: Any) -> Packing:
    return describe(1, ends[-1], cu_seqlens=torch.tensor(ends), **options)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


CASES: dict[str, Any] = {
    **{name: packing for name, packing in cases.CASES.items() if not name.startswith("no ")},
    "full mask": lambda: describe(3, 9, mask=torch.ones(3, 9, dtype=torch.bool)),
    "grouped pack": lambda: grouped(ENDS),
    "prefixes of a grouped pack": lambda: grouped(ENDS, mask=MASK[None], prefix=torch.tensor([2, 0, 9, 0, 10, 0, 4])),
    "streams": lambda: describe(3, 9, position=torch.tensor([5, 0, 3])),
    "masked streams": lambda: describe(3, 9, mask=HOLES, position=torch.tensor([5, 0, 3])),
    "streams at one place": lambda: describe(3, 9, position=torch.tensor([8, 8, 8])),
}


def grouped(ends: list[int], **options: Any) -> Packing:
    """A pack whose documents are grouped although that saves little."""
    with patch.multiple(packings, GROUP_COST=0, WASTE=100):
        return pack_of(ends, **options)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_equal_rows_are_views() -> None:
    x = random(2, 8, 3)
    for mask in (None, torch.ones(2, 8, dtype=torch.bool)):
        packing = describe(2, 8, mask=mask, prefix=torch.tensor([3, 1]))
        packed = packing.pack(x)
        assert packing.unpack(packed).data_ptr() == packed.data_ptr() == x.data_ptr()
        assert packing.position.tolist() == list(range(8))
        for chunk_size in (None, 4, 64):
            (grid,) = packing.grids(chunk_size, causal=True)
            for view in (grid.keys(packed), grid.queries(packed), grid.tokens(grid.keys(packed))):
                assert view.data_ptr() == x.data_ptr()


def test_groups_of_a_pack_hold_its_real_tokens_shortest_documents_first() -> None:
    prefixes = torch.tensor([2, 0, 9, 0, 10, 0, 4])
    packing, x = grouped(ENDS, mask=MASK[None], prefix=prefixes), random(1, ENDS[-1], 2)
    real = [MASK[start:stop].nonzero()[:, 0] + start for start, stop in pairwise(ENDS)]
    chosen = [5, 0, 3, 4, 2, 6]  # of 1, 2, 2, 15, 18 and 26 real tokens; the second document has none
    assert packing.groups == (1, 2, 1, 2)
    assert torch.equal(packing.pack(x), x[0, torch.cat([real[document] for document in chosen])])
    assert torch.equal(packing.unpack(packing.pack(x)), x * MASK[:, None])
    assert packing.position.tolist() == [place for document in chosen for place in range(len(real[document]))]
    assert packing.prefix is not None
    assert torch.equal(packing.prefix, prefixes[chosen])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_layer_that_is_recorded_for_one_length_says_what_to_use() -> None:
    with pytest.raises(LineartimeError, match=r"^A layer cannot be recorded by torch.jit.trace, .*: use torch.export"):
        torch.jit.trace(FLASH(16, d_qk=8), (torch.randn(1, 5, 16),))


def documents_of(packing: Packing, x: Tensor) -> list[Tensor]:
    """The tokens [N, ...] of each document."""
    return list(x.split(packing.new.tolist()))


def earlier_by_definition(x: Tensor, n: int, recent: Tensor) -> tuple[Tensor, Tensor]:
    """Of one document, [t, f]: the tokens before each, [n, t, f], and the last n."""
    known = torch.cat([recent, x])
    return torch.stack([known[n - by : len(known) - by] for by in range(1, n + 1)]), known[len(known) - n :]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_earlier_tokens_are_those_of_the_document_with_their_gradients(case: str, n: int) -> None:
    packing = CASES[case]()
    x, own = random(packing.count, 2).requires_grad_(), random(len(packing.new), n, 2)
    for recent in (own, None):
        before, after = packing.earlier(x, n, recent)
        known = own if recent is not None else torch.zeros_like(own)
        pairs = [earlier_by_definition(*each) for each in zip(documents_of(packing, x), [n] * len(own), known, strict=True)]
        expected = torch.cat([each for each, _ in pairs], 1)
        assert after is None if recent is None else torch.equal(after, torch.stack([last for _, last in pairs]))
        assert_same_with_gradients(torch.stack(before), expected, [x], atol=1e-12)


def test_what_a_stream_remembers_keeps_its_dtype() -> None:
    x, recent = torch.randn(6, 4, dtype=torch.bfloat16), torch.zeros(2, 1, 4)
    for mask in (None, torch.arange(4) < torch.tensor([[4], [2]])):
        packing = describe(2, 3 if mask is None else 4, mask=mask, position=torch.zeros(2, dtype=torch.long))
        (before,), after = packing.earlier(x, 1, recent)
        assert after is not None
        assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)


# Chunks ---------------------------------------------------------------------------------------------------------------


@every_pair(case=CASES, chunk_size=[None, 1, 4, 64], causal=[True, False])
def test_chunks_hold_the_tokens_of_documents_from_their_own_start(case: str, chunk_size: int | None, causal: bool) -> None:
    packing, first = CASES[case](), 0
    causal, streams = causal or packing.streams, packing.streams and chunk_size is not None
    position = torch.cat(
        [torch.arange(n) + (start if streams else 0) for n, start in zip(packing.new, packing.start, strict=True)]
    )
    label = (100 * packing.document + position + 1.0)[:, None]  # of each token: its document and position
    for grid, own in packing.by_grid(chunk_size, causal, label):
        slots = torch.arange(grid.size)
        opened = (100 * torch.arange(len(grid.end))[:, None] + grid.begin[grid.first][:, None] + slots + 1.0)[..., None]
        document, start, end = grid.document + first, grid.start[grid.document], grid.end[grid.document]
        expected = torch.where(
            (grid.begin[:, None] + slots) < end[:, None], 100 * document[:, None] + grid.begin[:, None] + slots + 1, 0
        )
        keys = (grid.keys(own, opened) if grid.slot is not None and streams else grid.keys(own))[..., 0]
        assert torch.equal(keys.long(), expected)
        assert torch.equal(grid.real, keys > 0)
        assert torch.equal(grid.sizes, grid.real.sum(1))
        assert torch.equal(grid.tokens(grid.queries(own)), own)
        assert torch.equal(torch.arange(len(grid.document))[grid.final], grid.final)
        assert torch.equal(document[grid.final], torch.arange(len(grid.end)) + first)
        prefix = torch.zeros_like(grid.end) if grid.prefix is None else grid.prefix
        for g, row in enumerate(grid.queries(own)[..., 0].long() - 1):
            for i, place in enumerate(row.tolist()):
                if place < 0:
                    continue
                t, p = place % 100, int(prefix[grid.document[g]])
                last = min(p, int(grid.begin[g]) + grid.size) - 1 if t < p else t
                seen = grid.last.expand(len(grid.document), grid.width)[g, i]
                assert seen == last - grid.begin[g]
                assert t >= start[g]
        first += len(grid.end)
    assert first == len(packing.new)


def test_documents_that_are_shorter_than_a_chunk_stand_in_fewer_slots() -> None:
    assert [grid.size for grid in grouped(ENDS).grids(64, causal=True)] == [2, 3, 22, 33]
    assert [grid.size for grid in grouped(ENDS, one_grid=True).grids(64, causal=True)] == [64]
    assert [grid.size for grid in describe(2, 20, one_grid=True).grids(64, causal=True)] == [64]
    assert describe(2, 5).grids(64, causal=True)[0].size == 5


@every_pair(ends=[[0, 9], [0, 1, 2, 2, 3, 9], [0, 0]], form=["list", "device"])
def test_sums_over_chunks_stay_in_their_document_even_if_another_is_infinite(ends: list[int], form: str) -> None:
    x = random(ends[-1], 3)
    x[0:1] = torch.inf
    (grid,) = pack_of(ends, one_grid=form == "device").grids(1, causal=True)  # a chunk for each token
    chunks, of = grid.keys(x)[:, 0], grid.document
    grid = grid if form == "list" else replace(grid, chunks=None)
    before, summed = grid.sum_before(chunks), grid.sum_of(chunks)
    torch.testing.assert_close(grid.of_documents(summed), summed[of])
    for document, total in enumerate(summed):
        own = (of == document).nonzero()[:, 0]
        torch.testing.assert_close(total, chunks[own].sum(0), atol=1e-12, rtol=0)
        for count, g in enumerate(own.tolist()):
            torch.testing.assert_close(before[g], chunks[own[:count]].sum(0), atol=1e-12, rtol=0)


# Groups ---------------------------------------------------------------------------------------------------------------


def cost(documents: int, longest: int) -> int:
    return documents * longest * (longest + packings.SLOT_COST)


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
