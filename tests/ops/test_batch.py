"""Batches and packs, against what they mean spelt out document by document."""

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs import every_pair
from torch import Tensor

from lineartime import FLASH
from lineartime.errors import LineartimeError
from lineartime.ops import make_batch as batches
from lineartime.ops import mixed_chunk_attention
from lineartime.ops.batch import Batch, Needs, Reach, places, shift_chunks, sum_chunks
from lineartime.ops.make_batch import GROUP_COST, MAX_GROUPS, make_batch, similar_documents

CPU = torch.device("cpu")
ENDS = [0, 3, 3, 25, 27, 46, 47, 80]
LENGTH = ENDS[-1]
MASK = (torch.arange(LENGTH) % 5 != 2)[None]


def pack_of(ends: list[int], chunk_size: int | None, **options: Any) -> Batch:
    return make_batch((1, ends[-1]), None, torch.tensor(ends), device=CPU, needs=Needs(chunk_size), **options)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 3, 64])
def test_equal_rows_keep_their_path_without_a_gather(chunk_size: int | None) -> None:
    x = random(2, 7, 3)
    for mask in (None, torch.ones(2, 7, dtype=torch.bool)):
        batch = make_batch((2, 7), mask, device=CPU, needs=Needs(chunk_size))
        assert batch.pack(x) is x
        assert batch.unpack(x) is x
        assert batch.order is batch.document is batch.slot is batch.chunk_document is None
        assert batch.positions.tolist() == list(range(7))
        causal = make_batch((2, 7), mask, None, torch.tensor([3, 1]), device=CPU, needs=Needs(chunk_size, rotary_width=4))
        assert causal.order is causal.document is causal.slot is causal.chunk_document is None
        assert causal.prefix is not None
        assert causal.prefix.rotations is not None
        assert causal.rotations is not None
        assert torch.equal(causal.prefix.pack(x), torch.cat([x[0, :3], x[1, :1]])[None])
        assert torch.equal(causal.prefix.rotations, causal.rotations[:, [0, 1, 2, 0]])


@pytest.mark.parametrize("mask", [torch.arange(30).view(3, 10) % 7 % 3 > 0, torch.arange(10) >= torch.tensor([[0], [4], [10]])])
def test_pack_holds_the_real_tokens_of_rows_in_order_and_unpacks_zeros_at_padding(mask: Tensor) -> None:
    x, batch = random(3, 10, 2), make_batch((3, 10), mask, device=CPU)
    packed = batch.pack(x.masked_fill(~mask[..., None], torch.nan))
    assert torch.equal(packed, x[mask][None])
    assert torch.equal(batch.unpack(packed), x * mask[..., None])
    assert batch.positions.tolist() == [place for count in mask.sum(1).tolist() for place in range(count)]
    assert batch.document is not None
    assert torch.equal(batch.document, mask.nonzero()[:, 0])


def test_pack_with_padding_and_prefixes_counts_real_tokens_of_each_document() -> None:
    prefixes = torch.tensor([2, 0, 9, 0, 10, 0, 4])
    batch = make_batch((1, LENGTH), MASK, torch.tensor(ENDS), prefixes, device=CPU, needs=Needs(8))
    x = random(1, LENGTH, 2)
    assert torch.equal(batch.pack(x), x[MASK][None])
    assert torch.equal(batch.unpack(batch.pack(x)), x * MASK[..., None])
    assert batch.prefix is not None
    real = [MASK[0, start:stop].nonzero()[:, 0] + start for start, stop in pairwise(ENDS)]
    in_prefixes = torch.cat([tokens[:count] for tokens, count in zip(real, prefixes, strict=True)])
    assert torch.equal(batch.prefix.pack(batch.pack(x)), x[:, in_prefixes])
    assert batch.positions.tolist() == [place for tokens in real for place in range(len(tokens))]
    assert batch.prefix.positions.tolist() == [place for count in prefixes.tolist() for place in range(count)]


@every_pair(case=["no rows", "no tokens", "all padding", "empty documents", "no documents"], chunk_size=[None, 4])
def test_documents_without_tokens_read_nothing(case: str, chunk_size: int | None) -> None:
    shape, mask, ends = {
        "no rows": ((0, 3), None, None),
        "no tokens": ((2, 0), torch.zeros(2, 0, dtype=torch.bool), None),
        "all padding": ((2, 3), torch.zeros(2, 3, dtype=torch.bool), None),
        "empty documents": ((1, 0), None, torch.tensor([0, 0, 0])),
        "no documents": ((1, 0), None, torch.tensor([0])),
    }[case]
    batch = make_batch(shape, mask, ends, device=CPU, needs=Needs(chunk_size))
    x = torch.ones(*shape, 2)
    packed = batch.pack(x)
    assert packed.numel() == 0
    assert torch.equal(batch.unpack(packed), torch.zeros_like(x))
    if chunk_size is None:
        assert torch.equal(batch.by_row(lambda rows, real: rows, packed), packed)
    else:
        assert torch.equal(batch.join(batch.cut(packed)), packed)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_layer_that_is_recorded_for_one_length_says_what_to_use() -> None:
    with pytest.raises(LineartimeError, match=r"^A layer cannot be recorded by torch.jit.trace, .*: use torch.export"):
        torch.jit.trace(FLASH(16, d_qk=8), (torch.randn(1, 5, 16),))


# Chunks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(0, 16), (5, 16), (17, 32), (100, 64), (64, 64), (33, 64)])
def test_chunks_of_short_rows_have_no_more_slots_than_these_need_up_to_a_power_of_two(length: int, expected: int) -> None:
    assert make_batch((2, length), device=CPU, needs=Needs(64)).chunk_size == expected


def test_packs_of_whole_chunks_have_one_part_and_rows_still_have_short_chunks() -> None:
    for ends in ([0, 300], [0, 3, 7, 300], [0, 1, 2, 3]):
        pack = pack_of(ends, 64, whole_chunks=True)
        assert (pack.parts, pack.chunk_size) == ((), 64)
    assert make_batch((2, 20), device=CPU, needs=Needs(64), whole_chunks=True).chunk_size == 32


def test_every_document_of_a_pack_starts_a_chunk() -> None:
    x, chunks = torch.arange(1.0, 8.0).view(1, 7, 1), pack_of([0, 4, 4, 7], 3)
    assert chunks.chunk_starts is not None
    assert chunks.chunk_document is not None
    assert chunks.chunk_starts.tolist() == [0, 2, 2, 3]
    assert chunks.chunk_document.tolist() == [0, 0, 2]
    assert places(chunks).tolist() == [0, 1, 0]
    assert chunks.cut(x).squeeze(-1).tolist() == [[[1, 2, 3], [4, 0, 0], [5, 6, 7]]]
    assert chunks.holds_token(CPU).tolist() == [[[True] * 3, [True, False, False], [True] * 3]]
    assert torch.equal(chunks.join(chunks.cut(x)), x)


@every_pair(ends=[[0, 9], [0, 1, 2, 2, 3, 9], [0, 0]], reach=["before", "others", "all"])
def test_sums_over_chunks_stay_in_their_document_even_if_another_is_infinite(ends: list[int], reach: Reach) -> None:
    x = random(2, ends[-1], 3)
    x[:, 0:1] = torch.inf
    summed = sum_chunks(x, pack_of(ends, 1), reach).expand_as(x)  # a chunk for each token
    for start, stop in pairwise(ends):
        for g in range(start, stop):
            read = {
                "before": x[:, start:g],
                "all": x[:, start:stop],
                "others": torch.cat([x[:, start:g], x[:, g + 1 : stop]], 1),
            }[reach]
            if not (reach == "others" and start == 0):  # total - own: infinity - infinity
                torch.testing.assert_close(summed[:, g], read.sum(1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("by", [1, 2, -3, 9])
def test_shifted_chunks_do_not_cross_documents(by: int) -> None:
    ends, x = [0, 2, 2, 6, 7], torch.arange(1.0, 8.0)[None]
    shifted = shift_chunks(x, pack_of(ends, 1), by)
    for start, stop in pairwise(ends):
        for g in range(start, stop):
            assert shifted[0, g] == (x[0, g - by] if start <= g - by < stop else 0)


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("dynamic", "count"), [pytest.param(*case, marks=NIGHTLY) for case in ((True, 1), (True, 7), (None, 7))]
)
def test_compiled_code_makes_room_for_all_divisions(dynamic: bool | None, count: int) -> None:
    def run(v: Tensor, mask: Tensor | None, ends: Tensor | None) -> Tensor:
        maps = [v[..., :4] * scale for scale in (1, 2, 3, 4)]
        return mixed_chunk_attention(*maps, v, chunk_size=4, causal=True, mask=mask, cu_seqlens=ends, backend="torch")

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    packs = [([0, 5, 19], None), ([0, 0, 19], MASK[:, :19]), ([0, 19, 19], ~MASK[:, :19]), ([0, 1, 19], MASK[:, :19] & False)]
    rows = [(None, torch.rand(3, 19) > 0.4), (None, torch.ones(3, 19, dtype=torch.bool)), (None, torch.zeros(3, 19) > 0)]
    divisions = [*rows, *packs][:count]
    for ends, mask in divisions:
        v, starts = random(1 if ends else 3, 19, 5), None if ends is None else torch.tensor(ends)
        torch.testing.assert_close(compiled(v, mask, starts), run(v, mask, starts), atol=1e-12, rtol=0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ends, mask in [each for each in divisions if each[1] is not None]:  # the same code reads every division
            compiled(random(1 if ends else 3, 19, 5), mask, None if ends is None else torch.tensor(ends))


# Packs in parts -------------------------------------------------------------------------------------------------------


def cost(documents: int, longest: int) -> int:
    return documents * longest * (longest + batches.SLOT_COST)


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


def test_parts_of_a_pack_hold_its_tokens_in_order() -> None:
    with patch.multiple(batches, GROUP_COST=0, WASTE=100, MIN_CHUNK_SIZE=1):
        pack = pack_of(ENDS, 64)
    orders = [part.order for part in pack.parts if part.order is not None]
    assert sorted(torch.cat(orders).tolist()) == list(range(LENGTH))
    assert orders[0].tolist() == [25, 26, 46]  # the documents of 2 and 1 tokens
    assert pack.parts[0].positions.tolist() == [0, 1, 0]
    assert [part.chunk_size for part in pack.parts] == [2, 4, 32, 64]
    x = torch.randn(1, LENGTH, 3)
    assert torch.equal(pack.by_part(lambda tokens, part: tokens + part.positions[:, None], x), x + pack.positions[:, None])
