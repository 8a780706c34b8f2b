"""What lm-evaluation-harness asks of a causal model: how likely continuations are, many of different lengths in one batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lineartime.hf import LineartimeConfig, LineartimeForCausalLM

Tiny = Callable[..., LineartimeConfig]
Awake = Callable[[Any], Any]

# Contexts and continuations, of one token to several chunks of 8.
LENGTHS = [(1, 1), (3, 2), (7, 1), (8, 8), (20, 5), (33, 4)]


def requests() -> list[tuple[list[int], list[int]]]:
    torch.manual_seed(0)
    return [(torch.randint(0, 40, (n,)).tolist(), torch.randint(0, 40, (m,)).tolist()) for n, m in LENGTHS]


def loglikelihood(logits: Tensor, context: list[int], continuation: list[int]) -> float:
    """Of a continuation, given the logits of all but the last of the real tokens."""
    chances = logits[len(context) - 1 :].double().log_softmax(-1)
    return float(chances[torch.arange(len(continuation)), continuation].sum())


def together(model: LineartimeForCausalLM, side: str, masked: bool) -> list[float]:
    """The loglikelihoods of all requests from one padded batch."""
    rows = [torch.tensor([*context, *continuation][:-1]) for context, continuation in requests()]
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), 7), torch.zeros(len(rows), longest, dtype=torch.long)
    places = [slice(0, len(row)) if side == "right" else slice(longest - len(row), longest) for row in rows]
    for index, (row, place) in enumerate(zip(rows, places, strict=True)):
        ids[index, place], mask[index, place] = row, 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask if masked else None).logits
    of_rows = zip(logits, places, requests(), strict=True)
    return [loglikelihood(row[place], *request) for row, place, request in of_rows]


def alone(model: LineartimeForCausalLM) -> list[float]:
    """The loglikelihoods of the requests, each read by itself."""
    found = []
    with torch.no_grad():
        for context, continuation in requests():
            logits = model(torch.tensor([[*context, *continuation][:-1]])).logits[0]
            found.append(loglikelihood(logits, context, continuation))
    return found


@pytest.mark.parametrize("system", ["flash", "flash-quad", "transformer++", "performer", "combiner"])
def test_a_padded_batch_gives_the_loglikelihoods_of_single_requests(system: str, tiny: Tiny, awake: Awake) -> None:
    model = awake(LineartimeForCausalLM(tiny(system))).double()
    exact = pytest.approx(alone(model), abs=1e-8)
    assert together(model, "right", masked=False) == exact  # as lm-evaluation-harness asks: causal models read no padding
    assert together(model, "right", masked=True) == exact
    assert together(model, "left", masked=True) == exact
