import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lineartime.data import read_window, spread_windows
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig
from lineartime.training.loop import prepare


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
