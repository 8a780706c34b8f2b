"""The stack of blocks, read by parts: tokens that are embedded already in, what each block reads out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime import build
from lineartime.models.backbone import Backbone


@pytest.fixture
def backbone() -> Backbone:
    return build("flash-tiny", n_blocks=2, d_model=16, d_qk=8, chunk_size=4).backbone.eval()


def chain(backbone: Backbone, inputs: list[Tensor], hidden: Tensor) -> None:
    """Each block's output is what the next one reads, and the norm of the last one's is what comes out."""
    first, second = backbone.blocks
    packing = first.mixer.describe(hidden.shape, device=hidden.device)
    assert len(inputs) == 2
    torch.testing.assert_close(packing.unpack(first(packing.pack(inputs[0]), packing)), inputs[1])
    torch.testing.assert_close(backbone.norm(packing.unpack(second(packing.pack(inputs[1]), packing))), hidden)


def test_every_way_to_read_hands_out_what_each_block_reads(backbone: Backbone) -> None:
    ids = torch.randint(258, (2, 9))
    embedded = backbone.embedding(ids)
    inputs: list[Tensor] = []
    hidden = backbone.read(embedded, inputs=inputs)
    torch.testing.assert_close(hidden, backbone(ids))
    chain(backbone, inputs, hidden)

    pieces: list[Tensor] = []
    streamed, _ = backbone.extend(embedded, inputs=pieces)
    torch.testing.assert_close(streamed, hidden, atol=1e-5, rtol=0)
    torch.testing.assert_close(pieces, inputs, atol=1e-5, rtol=0)

    _, state = backbone.extend(ids[:, :8])
    last: list[Tensor] = []
    with torch.no_grad():
        stepped, _ = backbone.extend(embedded[:, 8:], state, inputs=last)
    torch.testing.assert_close(stepped, hidden[:, 8:], atol=1e-5, rtol=0)
    torch.testing.assert_close(last, [x[:, 8:] for x in inputs], atol=1e-5, rtol=0)


def test_prefix_of_embedded_tokens_is_read_in_both_directions() -> None:
    backbone = build("flash-tiny", task="prefix-lm", n_blocks=2, d_model=16, d_qk=8, chunk_size=4).backbone
    ids = torch.randint(258, (2, 9))
    inputs: list[Tensor] = []
    hidden, state = backbone.read_prefix(backbone.embedding(ids), inputs=inputs)
    torch.testing.assert_close(hidden, backbone(ids, prefix_lengths=torch.tensor([9, 9])), atol=1e-5, rtol=0)
    assert [x.shape for x in inputs] == [(2, 9, 16)] * 2
    assert state.position.tolist() == [9, 9]


def test_padding_on_the_right_needs_no_learned_positions() -> None:
    model = build("transformer-tiny", n_blocks=1, d_model=16, n_heads=2, vocab_size=40, max_positions=8).eval()
    ids = torch.randint(0, 40, (1, 8))
    padded, mask = F.pad(ids, (0, 2)), torch.arange(10)[None] < 8
    torch.testing.assert_close(model(padded, mask)[:, :8], model(ids))
