"""Decoding one more token of each stream, and by torch.compile, as test_compile_blocks.py does with its real compiler."""

import copy
import pickle

import pytest
import torch

import lineartime
from lineartime.models.language_model import CausalLM, read_token


@pytest.mark.parametrize("rotated", ["inputs", pytest.param("features", marks=pytest.mark.nightly)])
@torch.no_grad()
def test_the_step_of_linear_attention_compiles_as_one_graph(rotated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, fullgraph: compiler(step, fullgraph=fullgraph, backend="aot_eager"))
    options = {"d_model": 16, "n_blocks": 1, "vocab_size": 30, "n_heads": 2, "rotated": rotated}
    model = lineartime.build("performer-tiny", **options).eval().double()
    assert isinstance(model, CausalLM)
    ids = torch.randint(0, 30, (2, 9))
    _, state = model.extend(ids[:, :5])
    model.compile_step()
    found = []
    for tokens in ids[:, 5:].T:
        logits, state = read_token(model, tokens, state)
        found.append(logits)
    torch.testing.assert_close(torch.stack(found, 1), model(ids)[:, 5:], atol=1e-12, rtol=1e-9)


def test_a_model_without_a_constant_state_has_no_step_to_compile() -> None:
    model = lineartime.build("flash-quad-tiny", d_model=16, n_blocks=1, vocab_size=30, d_qk=8)
    model.compile_step()
    assert model.compiled_step is None


def test_a_model_with_a_compiled_step_is_pickled_without_it() -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1, vocab_size=30, d_qk=8, chunk_size=4)
    model.compile_step()
    other = pickle.loads(pickle.dumps(model))
    assert other.compiled_step is copy.deepcopy(model).compiled_step is None
    assert model.compiled_step is not None
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
