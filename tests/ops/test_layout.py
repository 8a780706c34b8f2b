"""Layouts, against what they mean spelt out document by document."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime import FLASH
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.ops.chunks import Chunks, Reach, Slots, shift_chunks, sum_chunks
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.make_layout import make_layout

CPU = torch.device("cpu")


def positions(length: int, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    return make_layout((1, length), mask, cu_seqlens, device=CPU).positions


def rows_of(layout: Layout) -> Slots:
    assert layout.rows is not None
    return layout.rows


def chunks_of(ends: list[int], chunk_size: int) -> Chunks:
    plan = LayoutPlan(chunk_size=chunk_size)
    return make_layout((1, ends[-1]), None, torch.tensor(ends), device=CPU, plan=plan).require_chunks()


@pytest.mark.parametrize(("length", "expected"), [(0, 16), (5, 16), (17, 32), (100, 64), (64, 64), (33, 64)])
def test_chunks_of_short_rows_have_no_more_slots_than_these_need_up_to_a_power_of_two(length: int, expected: int) -> None:
    plan = LayoutPlan(chunk_size=64)
    layout = make_layout((2, length), device=CPU, plan=plan)
    assert layout.require_chunks().chunk_size == expected
    assert layout.plan == plan, "a mixer must know the layout as its own"


def test_packs_of_whole_chunks_have_one_part_and_rows_still_have_short_chunks() -> None:
    plan, cpu = LayoutPlan(chunk_size=64), torch.device("cpu")
    for ends in ([0, 300], [0, 3, 7, 300], [0, 1, 2, 3]):
        pack = make_layout((1, ends[-1]), None, torch.tensor(ends), device=cpu, plan=plan, whole_chunks=True)
        assert (pack.parts, pack.require_chunks().chunk_size) == (None, 64)
    assert make_layout((2, 20), device=cpu, plan=plan, whole_chunks=True).require_chunks().chunk_size == 32


def test_positions_count_real_tokens_of_each_document() -> None:
    assert positions(4, None, None).tolist() == [0, 1, 2, 3]
    mask = torch.tensor([[False, True, False, True]])
    assert positions(4, mask, None)[0, mask[0]].tolist() == [0, 1]
    assert positions(5, None, torch.tensor([0, 2, 2, 5])).tolist() == [0, 1, 0, 1, 2]
    both = positions(5, torch.tensor([[True, True, False, True, True]]), torch.tensor([0, 2, 5]))
    assert both[0, [0, 1, 3, 4]].tolist() == [0, 1, 0, 1]


def test_arrange_puts_real_tokens_side_by_side_and_restore_takes_them_back() -> None:
    mask = torch.rand(3, 10) > 0.5
    x = torch.randn(3, 10, 2)
    rows = rows_of(make_layout((3, 10), mask, device=CPU))
    arranged = rows.arrange(x)[:, 0]
    assert arranged.shape[1] == mask.sum(1).max()  # no longer than need be
    for row in range(3):
        count = int(mask[row].sum())
        assert torch.equal(arranged[row, :count], x[row, mask[row]])
        assert not arranged[row, count:].any()
    assert torch.equal(rows.restore(arranged[:, None]), x * mask[..., None])


def test_every_document_of_a_pack_starts_a_chunk() -> None:
    x = torch.arange(1.0, 8.0).view(1, 7, 1)
    chunks = chunks_of([0, 4, 4, 7], 3)
    assert chunks.document_starts.tolist() == [0, 2, 2, 3]
    assert chunks.document is not None
    assert chunks.document.tolist() == [0, 0, 2]
    assert chunks.places().tolist() == [0, 1, 0]
    assert chunks.cut(x).squeeze(-1).tolist() == [[[1, 2, 3], [4, 0, 0], [5, 6, 7]]]
    assert chunks.holds_token(CPU).tolist() == [[[True] * 3, [True, False, False], [True] * 3]]
    assert torch.equal(chunks.join(chunks.cut(x)), x)


@pytest.mark.parametrize("ends", [[0, 9], [0, 2, 2, 9], [0, 1, 2, 3, 8, 8, 9], [0, 0]])
@pytest.mark.parametrize("reach", ["before", "others", "all"])
def test_sums_over_chunks_stay_in_their_document_even_if_another_is_infinite(ends: list[int], reach: Reach) -> None:
    chunks = chunks_of(ends, 1)  # a chunk for each token
    x = torch.randn(2, ends[-1], 3, dtype=torch.float64)
    x[:, 0:1] = torch.inf
    summed = sum_chunks(x, chunks, reach).expand_as(x)
    for start, stop in pairwise(ends):
        for g in range(start, stop):
            read = {
                "before": x[:, start:g],
                "all": x[:, start:stop],
                "others": torch.cat([x[:, start:g], x[:, g + 1 : stop]], 1),
            }[reach]
            expected = read.sum(1)
            if not (reach == "others" and start == 0):  # total - own: infinity - infinity
                torch.testing.assert_close(summed[:, g], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("by", [1, 2, 9, -1, -3, -9])
def test_shifted_chunks_do_not_cross_documents(by: int) -> None:
    ends = [0, 2, 2, 6, 7]
    x = torch.arange(1.0, 8.0)[None]
    shifted = shift_chunks(x, chunks_of(ends, 1), by)
    for start, stop in pairwise(ends):
        for g in range(start, stop):
            assert shifted[0, g] == (x[0, g - by] if start <= g - by < stop else 0)


@pytest.mark.parametrize(("mask", "cu_seqlens"), [(None, None), (torch.ones(1, 6, dtype=torch.bool), torch.tensor([0, 4, 6]))])
def test_rotations_are_made_for_tokens_chunks_and_places(mask: Any, cu_seqlens: Any) -> None:
    plan = LayoutPlan(rotary_width=4, bias_width=8, bias_places=5, chunk_size=3, dtype=torch.float64)
    layout = make_layout((1, 6), mask, cu_seqlens, device=CPU, plan=plan)
    assert layout.rotations is not None
    assert layout.chunk_rotations is not None
    assert layout.place_rotations is not None
    assert layout.place_rotations.shape == (2, 5, 4)
    assert layout.rotations.dtype == torch.float64
    cos = layout.rotations[0].expand(1, 6, 2)
    assert torch.equal(layout.require_chunks().join(layout.chunk_rotations[0]), cos)
    torch.testing.assert_close(cos[0, :, 0], layout.positions.flatten().double().cos())


def test_a_layout_that_lacks_what_a_mixer_needs_says_how_to_make_it() -> None:
    layout = make_layout((1, 6), None, device=CPU)
    with pytest.raises(ArgumentError, match=r"^layout has no chunks: make it with a plan that has a chunk_size"):
        layout.require_chunks()
    with pytest.raises(ArgumentError, match=r"^layout has no open chunk: make it with step_layout of a mixer with chunks"):
        layout.require_open_chunk()
    mixer = FLASH(8, d_qk=4, chunk_size=3, causal=True)
    assert mixer.step_layout(torch.tensor([4, 0])).require_open_chunk().slot.tolist() == [1, 0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_layer_that_is_recorded_for_one_length_says_what_to_use() -> None:
    with pytest.raises(LineartimeError, match=r"^A layer cannot be recorded by torch.jit.trace, .*: use torch.export"):
        torch.jit.trace(FLASH(16, d_qk=8), (torch.randn(1, 5, 16),))
