"""Token shift, against what it means spelt out token by token."""

import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.ops.activations import by_document
from lineartime.ops.batch import Batch
from lineartime.ops.make_batch import make_batch, stream_batch
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


def shifted_in(batch: Batch, x: Tensor) -> Tensor:
    return batch.unpack(shift_tokens(batch.pack(x), batch.positions))


def tokens(batch: int, d: int = 6) -> Tensor:
    return torch.randn(batch, LENGTH, d, dtype=torch.float64, requires_grad=True)


@every_pair(d=[1, 5, 6], side=[None, *MASKS], packed=[False, True])
def test_whole_sequences_are_the_definition_with_its_gradients(d: int, side: str | None, packed: bool) -> None:
    x, mask = tokens(1 if packed else 3, d), None if side is None else MASKS[side]
    if packed and mask is not None:
        mask = mask[1:2]
    shifted = shifted_in(make_batch(x.shape, mask, PACK if packed else None, device=CPU), x)
    document = torch.bucketize(torch.arange(LENGTH), PACK[1:], right=True) if packed else None
    expected = by_document(definition, x, document=document, real=mask)
    assert torch.equal(shifted, expected)
    direction = torch.randn_like(x)
    (gradient,), (wanted,) = (torch.autograd.grad((y * direction).sum(), x) for y in (shifted, expected))
    torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=0)


@every_pair(cuts=[[9], [1] * 9, [0, 4, 0, 5, 0]], side=[None, *MASKS])
def test_stream_is_the_definition_however_it_is_cut(cuts: list[int], side: str | None) -> None:
    x, last, position, pieces = tokens(3, 5), torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.long), []
    mask = torch.ones(3, LENGTH, dtype=torch.bool) if side is None else MASKS[side]
    for piece, real in zip(x.split(cuts, 1), mask.split(cuts, 1), strict=True):
        batch = stream_batch(position, piece.shape, None if side is None else real)
        shifted, last = shift_next(batch.pack(piece), last, batch.counts)
        position = position + real.sum(1)
        pieces.append(batch.unpack(shifted))
    assert torch.equal(torch.cat(pieces, 1), by_document(definition, x, real=mask))
    for row, real, end in zip(x, mask, last, strict=True):
        own = row[real]
        assert torch.equal(end, own[-1, :3] if len(own) else torch.zeros(3, dtype=torch.float64))


def test_what_a_stream_remembers_keeps_its_dtype() -> None:
    shifted, last = shift_next(torch.randn(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 2))
    assert (shifted.dtype, last.dtype) == (torch.bfloat16, torch.float32)
