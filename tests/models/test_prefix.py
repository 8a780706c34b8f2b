"""Models that read a prefix in both directions."""

from typing import Any

import pytest
import torch

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.models import CausalLM
from lineartime.ops.context import ContextGroup
from lineartime.ops.cross_entropy import IGNORED

SIZES: dict[str, dict[str, Any]] = {
    "flash": {"d_qk": 16, "chunk_size": 8},
    "flash-quad": {"d_qk": 16, "max_length": 20},
    "transformer++": {"n_heads": 2},
}


def build(system: str, **overrides: Any) -> CausalLM:
    model = lineartime.build(f"{system}-tiny", "prefix-lm", d_model=32, vocab_size=16, **{**SIZES[system], **overrides})
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize("system", SIZES)
def test_parts_of_a_sequence_before_and_behind_its_prefix_are_those_of_the_streams(system: str) -> None:
    model = build(system, n_blocks=3).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, length = torch.randint(0, 16, (2, 19)), 11
    whole = model(ids, prefix_lengths=torch.full((2,), length))
    first, state = model.read_prefix(ids[:, :length])
    rest, _ = model.extend(ids[:, length:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-9, rtol=0)
    other = ids.clone()
    other[:, length:] = 15 - other[:, length:]
    assert torch.equal(model(other, prefix_lengths=torch.full((2,), length))[:, :length], whole[:, :length])
    assert not torch.allclose(model(ids)[:, : length - 1], whole[:, : length - 1])


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_is_the_mean_over_targets_with_and_without_recomputed_blocks(recompute: bool) -> None:
    model = build("flash", n_blocks=2)
    if recompute:
        model.recompute_blocks()
    ids, mask, lengths = torch.randint(0, 16, (2, 19)), torch.arange(19) >= torch.tensor([[0], [4]]), torch.tensor([9, 2])
    targets = torch.where(torch.rand(2, 19) > 0.5, ids.roll(-1, 1), IGNORED)
    loss = model.loss(ids, targets, mask=mask, prefix_lengths=lengths)
    logits = model(ids, mask, prefix_lengths=lengths)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_systems_without_a_prefix_form_are_no_prefix_models() -> None:
    with pytest.raises(ArgumentError, match="task is 'prefix-lm', but a model of combiner cannot read a prefix in both direct"):
        lineartime.build("combiner-tiny", "prefix-lm")
    ids, lengths = torch.zeros(1, 3, dtype=torch.long), torch.tensor([1])
    performer = lineartime.build("performer-tiny", n_blocks=1)
    for call in (lambda: performer(ids, prefix_lengths=lengths), lambda: performer.read_prefix(ids)):
        with pytest.raises(LineartimeError, match="Performer does not support prefixes: only GAU, FLASH with"):
            call()
    with pytest.raises(ArgumentError, match="causal is False"):
        lineartime.build("flash-tiny", "mlm", n_blocks=1)(ids, prefix_lengths=lengths)


def test_prefixes_of_sequences_that_processes_hold_together_are_refused() -> None:
    model, context = build("flash", n_blocks=1), ContextGroup("none", 0, 2)
    with pytest.raises(ArgumentError, match="prefix_lengths is given, but sequences that are split over processes can have"):
        model(torch.zeros(1, 8, dtype=torch.long), prefix_lengths=torch.tensor([1]), context=context)
