"""FLASH's attention a token at a time, for streams at different positions, against each stream alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime.ops import mixed_chunk_attention_extend, mixed_chunk_state
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.mixed_chunk_step import mixed_chunk_attention_step, mixed_chunk_streams

CHUNK, D_QK, D_VALUE = 4, 6, 5
READ = [0, 1, 3, 4, 11]
"""How many tokens the streams have read before they are joined."""


def make_inputs(length: int) -> list[Tensor]:
    return [torch.randn(1, length, width, dtype=torch.float64) for width in (D_QK, D_QK, D_QK, D_QK, D_VALUE)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("normalization", ["count", "paper"])
@pytest.mark.parametrize("biased", [False, True])
def test_joined_streams_continue_as_each_would_alone(activation: Any, normalization: Any, biased: bool) -> None:
    options: dict[str, Any] = {"activation": activation, "normalization": normalization}
    options["bias"] = torch.randn(CHUNK, CHUNK, dtype=torch.float64) if biased else None
    inputs = [make_inputs(read + 10) for read in READ]
    empty = mixed_chunk_state(1, CHUNK, D_QK, D_VALUE, like=inputs[0][0])
    alone = [mixed_chunk_attention_extend(*whole, empty, **options)[0] for whole in inputs]

    states = []
    for whole, read in zip(inputs, READ, strict=True):
        states.append(mixed_chunk_attention_extend(*(x[:, :read] for x in whole), empty, **options)[1])
    before = [part.clone() for state in states for part in state if isinstance(part, Tensor)]
    streams = mixed_chunk_streams(states)
    for new in range(10):  # through the end of two chunks
        tokens = [
            torch.cat([whole[part][:, read + new, None] for whole, read in zip(inputs, READ, strict=True)]) for part in range(5)
        ]
        bias = options["bias"]
        rows = {} if bias is None else {"bias": bias[streams.position % CHUNK]}
        out = mixed_chunk_attention_step(*tokens, streams, **options | rows)
        expected = torch.cat([whole[:, read + new, None] for whole, read in zip(alone, READ, strict=True)])
        torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    assert streams.position.tolist() == [read + 10 for read in READ]
    after = [part for state in states for part in state if isinstance(part, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "joining must leave the states as they are"


def test_a_step_can_be_recorded() -> None:
    """A CUDA graph repeats the same operations on the same memory: no shape may depend on a position."""
    state = mixed_chunk_state(2, CHUNK, D_QK, D_VALUE, like=torch.empty(0, dtype=torch.float64))
    streams = mixed_chunk_streams([state])
    places = [tensor.data_ptr() for tensor in streams]
    step = torch.compile(mixed_chunk_attention_step, backend="aot_eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2 * CHUNK + 1):
            step(*(torch.randn(2, 1, width, dtype=torch.float64) for width in (D_QK, D_QK, D_QK, D_QK, D_VALUE)), streams)
    assert [tensor.data_ptr() for tensor in streams] == places
    assert streams.position.tolist() == [2 * CHUNK + 1] * 2
