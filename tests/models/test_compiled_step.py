"""Products of one row are computed as sums, with equal results; others are left alone. test_compile_blocks.py compiles them."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineartime
from lineartime.models import backbone
from lineartime.models.compiled_step import OneRowProducts, _checked_at_each_step, bmm_row, linear_row
from lineartime.models.language_model import CausalLM


class Quantized(Tensor):
    """Weights that another library keeps in a form of its own."""


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_row_times_a_matrix_is_the_dense_map(dtype: torch.dtype, tolerance: float, with_bias: bool) -> None:
    x, weight = torch.randn(1, 1, 7, dtype=dtype), torch.randn(5, 7, dtype=dtype)
    bias = torch.randn(5, dtype=dtype) if with_bias else None
    expected, found = F.linear(x, weight, bias), linear_row(x, weight, bias)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_rows_times_a_matrix_each_are_the_batched_product(dtype: torch.dtype, tolerance: float) -> None:
    x, matrices = torch.randn(3, 1, 7, dtype=dtype), torch.randn(3, 5, 7, dtype=dtype).mT
    torch.testing.assert_close(bmm_row(x, matrices), torch.bmm(x, matrices), atol=tolerance, rtol=tolerance)


def test_only_products_that_read_a_matrix_by_rows_once_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[str] = []

    def recorded(name: str) -> Tensor:
        replaced.append(name)
        return torch.zeros(())

    monkeypatch.setattr("lineartime.models.compiled_step.linear_row", lambda *_: recorded("linear"))
    monkeypatch.setattr("lineartime.models.compiled_step.bmm_row", lambda *_: recorded("bmm"))
    row, rows, weight, matrices = torch.ones(1, 1, 6), torch.ones(2, 1, 6), torch.ones(6, 6), torch.ones(2, 6, 6)
    by_columns = weight.mT.contiguous().mT
    with OneRowProducts():
        F.linear(rows, weight)
        F.linear(row, by_columns)
        torch.bmm(rows, matrices)
        torch.bmm(torch.ones(2, 3, 6), matrices.mT)
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(row, weight)
        F.linear(row, weight.as_subclass(Quantized))
        assert not replaced
        F.linear(row, weight)
        torch.bmm(rows, matrices.mT)
        assert replaced == ["linear", "bmm"]


@pytest.mark.parametrize("n_streams", [1, 3])
def test_a_step_with_these_products_is_the_step(n_streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(backbone, "flash_stack", lambda *_: None)
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=2, vocab_size=30, d_qk=8, chunk_size=4).eval().double()
    assert isinstance(model, CausalLM)
    ids = torch.randint(0, 30, (n_streams, 14))
    with torch.no_grad():
        _, state = model.extend(ids[:, :5], model.init_state(n_streams))
        plain, other = model.join_streams([state]), model.join_streams([state])
        expected = torch.cat([model.step(ids[:, place, None], plain) for place in range(5, 14)], 1)
        model.compile_step()
        found = torch.cat([model.step(ids[:, place, None], other) for place in range(5, 14)], 1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("rotated", ["inputs", "features"])
def test_the_step_of_linear_attention_compiles_as_one_graph(rotated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, fullgraph, options: compiler(function, fullgraph=fullgraph, backend="aot_eager")
    )
    model = (
        lineartime.build("performer-tiny", d_model=16, n_blocks=1, vocab_size=30, n_heads=2, rotated=rotated).eval().double()
    )
    assert isinstance(model, CausalLM)
    ids = torch.randint(0, 30, (2, 9))
    with torch.no_grad():
        _, state = model.extend(ids[:, :5], model.init_state(2))
        streams = model.join_streams([state])
        model.compile_step()
        found = torch.cat([model.step(ids[:, place, None], streams) for place in range(5, 9)], 1)
        torch.testing.assert_close(found, model(ids)[:, 5:], atol=1e-12, rtol=1e-9)


def test_a_compiled_step_is_checked_against_tensors_options_and_modes_but_not_against_hooks_and_globals() -> None:
    kept = ["TENSOR_MATCH", "CONSTANT_MATCH", "TYPE_MATCH", "GRAD_MODE", "GLOBAL_STATE"]
    left_out = ["EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT"]
    guards = [SimpleNamespace(guard_type=kind, is_global=False) for kind in kept + left_out]
    guards.append(SimpleNamespace(guard_type="CLOSURE_MATCH", is_global=True))
    assert _checked_at_each_step(guards) == [True] * 5 + [False] * 3


def test_a_compiled_model_still_names_wrong_tokens_and_streams() -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=2, vocab_size=30, d_qk=8, chunk_size=4).eval()
    assert isinstance(model, CausalLM)
    streams = model.join_streams([model.init_state(1)])
    model._compiled_step = lambda *_: pytest.fail("nothing should be computed")
    with pytest.raises(ValueError, match=r"ids holds 30, but must be from 0 to vocab_size - 1 = 29"):
        model.step(torch.tensor([[30]]), streams)
    with pytest.raises(ValueError, match=r"ids has shape \[2, 1\], but must be \[1, 1\]"):
        model.step(torch.zeros(2, 1, dtype=torch.long), streams)
    with pytest.raises(ValueError, match=r"streams .* must be what join_streams returned"):
        model.step(torch.zeros(1, 1, dtype=torch.long), model.init_state(1))
    other = lineartime.build("flash-tiny", d_model=16, n_blocks=2, vocab_size=30, d_qk=8, chunk_size=4, token_shift=True)
    assert isinstance(other, CausalLM)
    with pytest.raises(ValueError, match="streams is a MixedChunkStreams with a token shift, but this FLASH needs a Mixed"):
        model.step(torch.zeros(1, 1, dtype=torch.long), other.join_streams([other.init_state(1)]))


def test_a_model_with_a_compiled_step_is_pickled_without_it() -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1, vocab_size=30, d_qk=8, chunk_size=4)
    model.compile_step()
    other = pickle.loads(pickle.dumps(model))
    assert other._compiled_step is copy.deepcopy(model)._compiled_step is None
    assert model._compiled_step is not None
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())
