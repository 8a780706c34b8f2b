"""Token shift, against what it means spelt out token by token."""

import pytest
import torch
from torch import Tensor

from lineartime.ops.documents import by_document
from lineartime.ops.layout import Layout, LayoutPlan
from lineartime.ops.make_layout import make_layout
from lineartime.ops.token_shift import shift_next, shift_tokens

CPU, LENGTH = torch.device("cpu"), 9
MASKS = {
    "left": torch.arange(LENGTH) >= torch.tensor([[0], [4], [LENGTH]]),
    "right": torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [0]]),
    "holes": torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0, 1]]).bool(),
}
PACK = torch.tensor([0, 3, 3, 4, 9])


def definition(x: Tensor) -> Tensor:
    """One document, [n, d] -> [n, d]."""
    half = -(-x.shape[-1] // 2)
    return torch.stack(
        [torch.cat([x[t - 1, :half] if t else torch.zeros_like(x[t, :half]), x[t, half:]]) for t in range(len(x))]
    )


def layout_of(x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Layout:
    return make_layout(x.shape, mask, cu_seqlens, device=CPU, plan=LayoutPlan(token_shift=True))


def tokens(batch: int, d: int = 6) -> Tensor:
    return torch.randn(batch, LENGTH, d, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("d", [1, 5, 6])
@pytest.mark.parametrize("side", [None, *MASKS])
@pytest.mark.parametrize("packed", [False, True])
def test_whole_sequences_are_the_definition_with_its_gradients(d: int, side: str | None, packed: bool) -> None:
    x, mask = tokens(1 if packed else 3, d), None if side is None else MASKS[side]
    if packed and mask is not None:
        mask = mask[1:2]
    layout = layout_of(x, mask, PACK if packed else None)
    expected = by_document(definition, x, layout=layout)
    shifted = shift_tokens(x, layout.previous)
    if mask is not None:
        shifted = shifted.masked_fill(~mask[..., None], 0.0)
    assert torch.equal(shifted, expected)
    direction = torch.randn_like(x)
    (gradient,), (wanted,) = (torch.autograd.grad((y * direction).sum(), x) for y in (shifted, expected))
    torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("cuts", [[9], [1] * 9, [0, 4, 0, 5, 0]])
def test_a_stream_is_the_definition_however_it_is_cut(cuts: list[int]) -> None:
    x, last, pieces = tokens(2, 5), torch.zeros(2, 3, dtype=torch.float64), []
    for piece in x.split(cuts, 1):
        shifted, last = shift_next(piece, last)
        pieces.append(shifted)
    assert torch.equal(torch.cat(pieces, 1), torch.stack([definition(row) for row in x]))
    assert torch.equal(last, x[:, -1, :3])


def test_what_a_stream_remembers_keeps_its_dtype() -> None:
    shifted, last = shift_next(torch.randn(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 2))
    assert (shifted.dtype, last.dtype) == (torch.bfloat16, torch.float32)


def test_no_tokens_are_shifted_to_no_tokens() -> None:
    empty = torch.zeros(2, 0, 4)
    assert shift_tokens(empty, layout_of(empty).previous).shape == empty.shape
    assert shift_tokens(empty, layout_of(empty, torch.zeros(2, 0, dtype=torch.bool)).previous).shape == empty.shape
    assert shift_tokens(empty[:1], layout_of(empty[:1], None, torch.tensor([0, 0])).previous).shape == (1, 0, 4)


def test_a_layout_finds_the_token_before_only_where_it_is_asked_to_and_must() -> None:
    x = tokens(1)
    assert layout_of(x).previous is None
    assert make_layout(x.shape, MASKS["left"][:1], PACK, device=CPU).previous is None
    assert layout_of(x, None, PACK).previous is not None
