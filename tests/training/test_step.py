"""The gradient of a step, and the loss on held-out text."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import lineartime
from lineartime.data import Batch, read_window, spread_windows
from lineartime.errors import LineartimeError
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


def test_quick_look_is_the_mean_over_its_windows_and_changes_no_mode_and_no_random_number(
    config: Callable[..., TrainConfig],
) -> None:
    trainer = prepare(config(eval_windows=3, batch_size=2))
    trainer.model.train()
    before = torch.get_rng_state()
    loss = trainer.validation.loss()
    assert trainer.model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert loss == trainer.validation.loss()

    stream = trainer.text.validation
    starts = [index * ((len(stream) - 1) // 24) // 3 * 24 for index in range(3)]
    losses = []
    for start in starts:
        window = read_window(stream, start, 25)
        losses.append(F.cross_entropy(trainer.model(window[None, :-1])[0], window[1:]))
    assert loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_packed_run_is_measured_with_its_documents_apart(config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):  # a line is a document
        lines = (json.dumps({"text": f"line {number}"}) for number in range(40))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    trainer = prepare(config(data=tmp_path, packed=True, eval_windows=2, batch_size=2))
    text = trainer.text.validation
    windows = torch.stack([read_window(text, start, 25) for start in spread_windows(text, 2, 24)])
    end = trainer.setup.tokenizer.end_of_document
    losses = []
    for window in windows:
        [*ends] = (window[:-1] == end).nonzero()[:, 0].tolist()
        for first, last in pairwise([-1, *ends, 24 - 1] if ends[-1:] != [23] else [-1, *ends]):
            document = window[first + 1 : last + 2]  # and the token after it, which an end of document does not predict
            targets = document[1:].masked_fill(document[:-1] == end, -100)
            losses.append(F.cross_entropy(trainer.model(document[None, :-1])[0], targets, reduction="sum").detach())
    count = int((windows[:, :-1] != end).sum())
    assert trainer.validation.loss() == pytest.approx(float(sum(losses)) / count, rel=1e-6)


def test_held_out_text_without_a_token_to_predict_is_an_error_and_not_a_loss_of_zero(
    config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "train.txt").write_text("text to train on\n" * 200)
    (texts / "valid.txt").write_text("ab")
    trainer = prepare(config(data=texts, task="mlm"))
    with pytest.raises(LineartimeError, match="has no token to predict"):
        trainer.validation.loss()


def test_masked_tokens_are_the_same_ones_every_time(config: Callable[..., TrainConfig]) -> None:
    losses = [prepare(config(task="mlm", batch_size=size)).validation.loss() for size in (1, 2, 4)]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2


def test_prefix_model_is_measured_on_what_follows_half_of_each_window(config: Callable[..., TrainConfig]) -> None:
    trainer = prepare(config(task="prefix-lm", eval_windows=1))
    window = read_window(trainer.text.validation, 0, 25)
    logits = trainer.model(window[None, :-1], prefix_lengths=torch.tensor([12]))[0]
    assert trainer.validation.loss() == pytest.approx(F.cross_entropy(logits[11:], window[12:]).item(), rel=1e-6)
    losses = [prepare(config(task="prefix-lm", batch_size=size)).validation.loss() for size in (1, 4)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
