"""The gradient of a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lineartime
from lineartime.data import Batch
from lineartime.runs.metrics import NullReporter
from lineartime.training.config import TrainConfig
from lineartime.training.loop import Stop, prepare
from lineartime.training.parallel import World, part_of

READERS = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__bool__, Tensor.__int__, Tensor.cpu, Tensor.numpy)


class HostCopies(TorchFunctionMode):
    """Counts how often losses and norms, float32 on the device, are copied to the host; its own sums are float64."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in READERS and args[0].dtype == torch.float32
        return function(*args, **(kwargs or {}))


def test_step_waits_for_the_device_once_however_many_micro_batches_it_has(config: Callable[..., TrainConfig]) -> None:
    trainer = prepare(config(tokens_per_batch=4 * 48))
    with HostCopies() as copies:
        trainer.take_step(NullReporter(), Stop())
    trainer.text.loader.close()
    assert copies.count == 1


@pytest.mark.parametrize("system", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny"])
def test_packed_batch_is_arranged_without_reading_anything_from_the_device(system: str) -> None:
    meta, ids = torch.device("meta"), torch.randint(0, 30, (1, 50))  # the meta device has no values to read
    model = lineartime.build(system, d_model=16, n_blocks=1, vocab_size=30).to(meta)
    batch = part_of(Batch(ids, ids, torch.tensor([0, 3, 40, 50])), World(), meta)
    assert model.total_loss(batch.inputs, batch.targets, cu_seqlens=batch.cu_seqlens).is_meta


def test_each_group_of_tokens_is_clipped_before_the_average(config: Callable[..., TrainConfig], monkeypatch: Any) -> None:
    trainer = prepare(config(clip_tokens=48, tokens_per_batch=4 * 24, clip_norm=0.01))  # below the norm of any gradient here
    batches = trainer.text.loader.next_step()
    trainer.text.loader.close()
    parameters = list(trainer.model.parameters())
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:
        gradient = torch.autograd.grad(trainer.model.loss(batch.inputs, batch.targets), parameters)
        norm = torch.cat([part.flatten() for part in gradient]).norm()
        for total, part in zip(expected, gradient, strict=True):
            total += part * (0.01 / norm) / len(batches)
    found: list[Tensor | None] = []
    monkeypatch.setattr(trainer, "_read", lambda: (batches, None))
    monkeypatch.setattr(trainer.optimizer, "step", lambda: found.extend(parameter.grad for parameter in parameters))
    trainer.take_step(NullReporter(), Stop())
    assert len(batches) == 2
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
