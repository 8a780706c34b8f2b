"""States of streams: which layer may continue them, in which precision, and how far."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from lineartime.baselines import Performer
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU, Attention
from lineartime.layers.mixer import Mixer
from lineartime.ops.state import State

D_MODEL, CHUNK = 16, 4
LAYERS: dict[str, Callable[..., Mixer]] = {
    "flash": partial(FLASH, d_qk=4, chunk_size=CHUNK),
    "gau": partial(GAU, d_qk=4),
    "attention": partial(Attention, n_heads=2),
    "performer": partial(Performer, n_heads=2),
}


@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_streams_begun_in_another_precision_are_continued(kind: str) -> None:
    layer, x = LAYERS[kind](D_MODEL, causal=True), torch.randn(1, CHUNK + 3, D_MODEL)
    _, state = layer.extend(x[:, :-1], None)
    whole, last = layer(x), x[:, -1:]
    for dtype in (torch.float64, torch.bfloat16):
        out, _ = layer.to(dtype).extend(last.to(dtype), state.clone())
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), whole[:, -1:], atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@torch.no_grad()
def test_step_in_half_precision_overflows_no_sooner_than_a_row() -> None:
    layer, x = FLASH(D_MODEL, d_qk=8, chunk_size=8, causal=True, initial_scores="unit"), torch.randn(2, 9, D_MODEL).half()
    layer.to_gate_value_base.weight[-8:] *= 15
    layer.to_gate_value_base.weight[32:64] *= 1e-3
    layer.gamma[:2] = 60.0
    layer.half()
    state, stepped = layer.init_state(2), []
    for place in range(9):
        out, state = layer.extend(x[:, place, None], state)
        stepped.append(out)
    whole = layer(x)
    assert whole.isfinite().all()
    torch.testing.assert_close(torch.cat(stepped, 1), whole, atol=0.05, rtol=0.02)


def test_step_beyond_a_table_of_biases_is_named() -> None:
    layer = GAU(8, d_qk=4, causal=True, max_length=3)
    state = State.concatenate([layer.init_state(1), layer.extend(torch.zeros(1, 2, 8), None)[1]])
    _, state = layer.extend(torch.zeros(2, 1, 8), state)
    with pytest.raises(ArgumentError, match=r"max_length is 3, .* but the sequence has 4 tokens"):
        layer.extend(torch.zeros(2, 1, 8), state)


@pytest.mark.parametrize("kind", LAYERS)
def test_no_streams_are_continued_by_any_number_of_tokens(kind: str) -> None:
    for new in (0, 1, CHUNK + 1):
        layer, x = LAYERS[kind](D_MODEL, causal=True, token_shift=new == 1), torch.zeros(0, new, D_MODEL)
        for gradients in (torch.enable_grad, torch.no_grad):
            with gradients():
                out, state = layer.extend(x, layer.init_state(0))
            assert out.shape == x.shape
            assert len(state) == 0
