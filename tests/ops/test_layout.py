import torch

from lineartime.ops.layout import document_chunks, document_rows, token_positions

CPU = torch.device("cpu")


def test_positions_count_real_tokens_of_each_document() -> None:
    assert token_positions(4, None, None, CPU).tolist() == [0, 1, 2, 3]
    mask = torch.tensor([[False, True, False, True]])
    assert token_positions(4, mask, None, CPU)[0, mask[0]].tolist() == [0, 1]
    assert token_positions(5, None, torch.tensor([0, 2, 2, 5]), CPU).tolist() == [0, 1, 0, 1, 2]
    both = token_positions(5, torch.tensor([[True, True, False, True, True]]), torch.tensor([0, 2, 5]), CPU)
    assert both[0, [0, 1, 3, 4]].tolist() == [0, 1, 0, 1]


def test_arrange_puts_real_tokens_side_by_side_and_restore_takes_them_back() -> None:
    mask = torch.rand(3, 10) > 0.5
    x = torch.randn(3, 10, 2)
    layout = document_rows(3, 10, mask, None, CPU)
    arranged = layout.arrange(x)[:, 0]
    assert arranged.shape[1] == mask.sum(1).max()  # no longer than need be
    for row in range(3):
        count = int(mask[row].sum())
        assert torch.equal(arranged[row, :count], x[row, mask[row]])
        assert not arranged[row, count:].any()
    assert torch.equal(layout.restore(arranged[:, None]), x * mask[..., None])


def test_every_document_of_a_pack_starts_a_chunk() -> None:
    x = torch.arange(1.0, 8.0).view(1, 7, 1)
    layout, chunks = document_chunks(1, 7, 3, None, torch.tensor([0, 4, 4, 7]), CPU)
    assert chunks == [2, 0, 1]
    assert layout.arrange(x).squeeze(-1).tolist() == [[[1, 2, 3], [4, 0, 0], [5, 6, 7]]]
    assert layout.real.tolist() == [[[True] * 3, [True, False, False], [True] * 3]]
