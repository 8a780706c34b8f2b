from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from lineartime.data import read_window
from lineartime.training.config import TrainConfig
from lineartime.training.loop import prepare


def test_the_quick_look_is_the_mean_over_its_windows_and_changes_no_mode_and_no_random_number(
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


def test_masked_tokens_are_the_same_ones_every_time(config: Callable[..., TrainConfig]) -> None:
    losses = [prepare(config(task="mlm", batch_size=size)).validation.loss() for size in (1, 2, 4)]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2


def test_a_prefix_model_is_measured_on_what_follows_half_of_each_window(config: Callable[..., TrainConfig]) -> None:
    trainer = prepare(config(task="prefix-lm", eval_windows=1))
    window = read_window(trainer.text.validation, 0, 25)
    logits = trainer.model(window[None, :-1], prefix_lengths=torch.tensor([12]))[0]
    assert trainer.validation.loss() == pytest.approx(F.cross_entropy(logits[11:], window[12:]).item(), rel=1e-6)
    losses = [prepare(config(task="prefix-lm", batch_size=size)).validation.loss() for size in (1, 4)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
