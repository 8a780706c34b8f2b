"""Chunks of another size after training."""

import torch

import lineartime
from lineartime.experiments.models import with_chunk_size
from lineartime.models import CausalLM


def test_other_chunks_keep_what_was_learnt_of_their_distances() -> None:
    model = lineartime.build("flash-tiny", chunk_size=16, d_model=16, n_blocks=1, d_qk=8)
    assert isinstance(model, CausalLM)
    ids = torch.arange(40)[None]
    before = model.eval()(ids)
    for size in (8, 16, 32):
        other = with_chunk_size(model, size)
        assert other is not None
        torch.testing.assert_close(other(ids)[:, :8], before[:, :8])  # the same distances have the same biases
        if size == 16:
            torch.testing.assert_close(other(ids), before)
        else:
            assert not torch.equal(other(ids)[:, 20:], before[:, 20:])
    [table] = [weight for name, weight in other.state_dict().items() if name.endswith("bias.table")]
    assert table[:16].eq(0).all()  # of chunks of 32: distances that training did not see
    assert with_chunk_size(model, 1024) is None  # whose bias has another form
