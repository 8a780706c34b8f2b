"""Flowformer: both forms against the definition, what it conserves, and that its causal form does not leak."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines import flowformer
from lineartime.baselines.flowformer import (
    Flowformer,
    empty_state,
    flowformer_attention,
    flowformer_attention_extend,
    flowformer_attention_oracle,
)
from lineartime.ops.make_batch import stream_batch


@every_pair(length=[1, 3, 17, 130], causal=[False, True], largest_flow=[5.0, 1.0])
def test_values_and_gradients_are_those_of_the_definition(
    length: int, causal: bool, largest_flow: float, assert_same_function: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flowformer, "MAX_FLOW", largest_flow)
    lengths = [length, (length + 1) // 2]
    real = torch.arange(length) < torch.tensor(lengths)[:, None]

    def fast(*inputs: Tensor) -> Tensor:
        inputs = tuple(x * real[..., None] for x in inputs)
        return flowformer_attention(*inputs, causal=causal, real=real) * real[..., None]

    def definition(*inputs: Tensor) -> Tensor:
        rows = [flowformer_attention_oracle(*(x[row, :n] for x in inputs), causal=causal) for row, n in enumerate(lengths)]
        return torch.stack([F.pad(row, (0, 0, 0, length - len(row))) for row in rows])

    assert_same_function(fast, definition, *(torch.randn(2, length, 4) for _ in range(3)))


def test_what_every_key_gives_and_every_query_takes_is_one_on_average() -> None:
    q, k = torch.randn(2, 40, 8, dtype=torch.float64).sigmoid()
    outgoing, incoming = k @ q.sum(0), q @ k.sum(0)
    torch.testing.assert_close((q @ (k / outgoing[:, None]).sum(0)).mean(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close((k @ (q / incoming[:, None]).sum(0)).mean(), torch.tensor(1.0, dtype=torch.float64))
    # With equal tokens, nothing competes: every query takes the mean of the values, and sigmoid(1) of it.
    values = torch.randn(40, 8, dtype=torch.float64)
    for causal in (False, True):
        out = flowformer_attention(torch.zeros_like(values), torch.zeros_like(values), values, causal=causal)
        mean = values.cumsum(0) / torch.arange(1, 41)[:, None] if causal else values.mean(0).expand_as(values)
        torch.testing.assert_close(out, torch.tensor(1.0, dtype=torch.float64).sigmoid() * mean, atol=1e-5, rtol=0)


def test_no_causal_output_has_a_gradient_for_a_later_token() -> None:
    q, k, v = (torch.randn(12, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = flowformer_attention(q, k, v, causal=True)
    for gradient in torch.autograd.grad(out[:6].square().sum(), (q, k, v)):
        assert not gradient[6:].any()
        assert gradient[:6].abs().sum() > 0


def test_a_stream_is_the_causal_form_with_constant_memory() -> None:
    q, k, v = (torch.randn(2, 2, 23, 4, dtype=torch.float64) for _ in range(3))
    state, pieces = empty_state(k, v.shape[-1]), []
    shapes = [part.shape for part in state.tensors()]
    for new in (slice(0, 2), slice(2, 2), slice(2, 14), slice(14, 23)):
        parts = q[:, :, new], k[:, :, new], v[:, :, new]
        batch = stream_batch(state.position, (2, parts[0].shape[2]))
        piece, state = flowformer_attention_extend(*parts, state, batch)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 2), flowformer_attention(q, k, v, causal=True), atol=1e-10, rtol=0)
    assert [part.shape for part in state.tensors()] == shapes
    assert state.position.tolist() == [23, 23]


@pytest.mark.parametrize("causal", [False, True])
def test_features_that_vanish_leave_everything_finite(causal: bool) -> None:
    layer = Flowformer(8, n_heads=1, rope=False, causal=causal)
    q = torch.full((1, 1, 5, 8), -200.0, requires_grad=True)  # whose sigmoid is zero in float32
    out = layer.attend(q, q, torch.randn(1, 1, 5, 8), None)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert out.isfinite().all()
    assert gradient.isfinite().all()
