"""Chunks of another size after training."""

import torch

import lineartime
from lineartime.experiments.models import with_chunk_size
from lineartime.models import CausalLM

SIZES = {"d_model": 16, "n_blocks": 1, "d_qk": 8}


def model_of(chunk_size: int) -> CausalLM:
    model = lineartime.build("flash-tiny", chunk_size=chunk_size, **SIZES)
    assert isinstance(model, CausalLM)
    return model.eval()


def test_the_same_size_is_the_same_function() -> None:
    model, ids = model_of(16), torch.arange(40)[None]
    other = with_chunk_size(model, 16)
    assert other is not None
    torch.testing.assert_close(other(ids), model(ids))


def test_within_a_smaller_chunk_the_model_computes_what_it_did() -> None:
    model, ids = model_of(16), torch.arange(40)[None]
    for size in (8, 32):
        other = with_chunk_size(model, size)
        assert other is not None
        torch.testing.assert_close(other(ids)[:, :8], model(ids)[:, :8])  # the same distances have the same biases
        assert not torch.equal(other(ids)[:, 20:], model(ids)[:, 20:])
    wider = with_chunk_size(model, 32)
    assert wider is not None
    table = wider.state_dict()[next(name for name in wider.state_dict() if name.endswith("bias.table"))]
    assert table[:16].eq(0).all()  # distances that training did not see


def test_a_bias_of_another_form_cannot_be_made() -> None:
    assert with_chunk_size(model_of(16), 1024) is None
