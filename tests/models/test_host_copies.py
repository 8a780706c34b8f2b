"""Nothing in a model waits for a device: on the meta device, which has no values, whoever looks at one fails."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lineartime
from lineartime.generation import Sampling
from lineartime.generation.decoding import step_and_pick
from lineartime.models import CausalLM

READERS = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)
OPTIONS: dict[str, Any] = {"d_model": 16, "d_qk": 8, "vocab_size": 30}


def on_meta(preset: str, **options: Any) -> CausalLM:
    with torch.device("meta"):
        model = lineartime.build(preset, n_blocks=2, **OPTIONS, **options)
    assert isinstance(model, CausalLM)
    return model


SYSTEMS = [("flash-tiny", False), ("flash-next-tiny", True), ("flash-quad-tiny", True)]


@pytest.mark.parametrize(("preset", "token_shift"), SYSTEMS)
def test_training_step_copies_nothing_to_the_host(preset: str, token_shift: bool) -> None:
    model, ids = on_meta(preset, token_shift=token_shift), torch.zeros(2, 40, dtype=torch.long, device="meta")
    loss = model.loss(ids, ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()  # this is how a copy would show


@pytest.mark.parametrize(("preset", "token_shift"), SYSTEMS)
@torch.no_grad()
def test_decode_step_copies_nothing_to_the_host(preset: str, token_shift: bool) -> None:
    model, token = on_meta(preset, token_shift=token_shift).eval(), torch.zeros(3, 1, dtype=torch.long, device="meta")
    state = None
    for _ in range(2):
        logits, state = model.extend(token, state)
        assert logits.shape == (3, 1, 30)
    for sampling in (Sampling(temperature=0.0), Sampling(1.0, 5, 0.9)):
        uniform = torch.zeros(3, device="meta")
        assert step_and_pick(model, state, sampling, token[:, 0], uniform).shape == (3,)  # type: ignore[arg-type]


class Reads(TorchFunctionMode):
    """Counts how often values are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READERS:
            self.found[function.__name__] += 1
        return function(*args, **(kwargs or {}))


LENGTHS = {"cu_seqlens": torch.tensor([0, 10, 40]), "mask": torch.arange(40)[None] > 4}


@pytest.mark.parametrize(("preset", "argument"), [("flash-tiny", "cu_seqlens"), ("flash-quad-tiny", "mask")])
def test_lengths_of_a_batch_are_read_once_and_not_in_every_layer(preset: str, argument: str) -> None:
    ids = torch.zeros(1, 40, dtype=torch.long)
    found = []
    for n_blocks in (1, 4):
        model = lineartime.build(preset, n_blocks=n_blocks, **OPTIONS)
        assert isinstance(model, CausalLM)
        with Reads() as reads:
            model.loss(ids, ids, **{argument: LENGTHS[argument]})
        found.append(reads.found)
    assert found[0] == found[1]
    assert found[0]["tolist"] == 1
