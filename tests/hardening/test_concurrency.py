"""Several threads and processes at once on one model, one run or one cache: the same results, or a sentence."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lineartime
from lineartime import Sampling
from lineartime import checkpoint as checkpoints
from lineartime.data import ByteTokenizer, load_corpus, token_stream
from lineartime.errors import LineartimeError
from lineartime.models.language_model import CausalLM
from lineartime.training.config import TrainConfig

Config = Callable[..., TrainConfig]
TINY: dict[str, dict[str, Any]] = {
    "flash-tiny": {"d_model": 32, "n_blocks": 2, "d_qk": 16, "chunk_size": 8},
    "flash-next-tiny": {"d_model": 32, "n_blocks": 2, "d_qk": 16, "chunk_size": 8, "token_shift": True},
    "flash-quad-tiny": {"d_model": 32, "n_blocks": 2, "d_qk": 16},
    "transformer++-tiny": {"d_model": 32, "n_blocks": 2, "n_heads": 2},
}


def at_once(actions: list[Callable[[], Any]]) -> list[Any]:
    """The results of actions that begin at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(actions), timeout=60)

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions))


@pytest.mark.parametrize("preset", TINY)
def test_threads_that_generate_from_one_model_get_what_each_would_get_alone(preset: str) -> None:
    model = lineartime.build(preset, vocab_size=258, **TINY[preset]).eval()
    assert isinstance(model, CausalLM)

    def text(seed: int) -> list[int]:
        prompt = torch.randint(0, 256, (3 + 5 * seed,), generator=torch.Generator().manual_seed(seed))
        return list(lineartime.generate(model, prompt, 30, Sampling(seed=seed)))

    alone = [text(seed) for seed in range(4)]
    fresh = lineartime.build(preset, vocab_size=258, **TINY[preset]).eval()  # its tables are not made yet
    fresh.load_state_dict(model.state_dict())
    model = fresh
    assert at_once([lambda seed=seed: text(seed) for seed in range(4)]) == alone


def test_trainings_in_one_folder_exclude_each_other(config: Config) -> None:
    def train() -> Any:
        try:
            return lineartime.train(config(steps=3))
        except LineartimeError as error:
            return str(error)

    results = at_once([train, train, train])
    sentences = [result for result in results if isinstance(result, str)]
    [finished] = [result for result in results if not isinstance(result, str)]
    assert finished.finished
    assert len(sentences) == 2
    for sentence in sentences:
        assert "which another run is using: wait for its end" in sentence or "already holds a run" in sentence
    lineartime.load(checkpoints.last_checkpoint(finished.run))


def test_threads_that_encode_the_same_text_do_not_disturb_each_other(text: Path, tmp_path: Path) -> None:
    def encode() -> Any:
        return token_stream(load_corpus(str(text)), "train", ByteTokenizer(), tmp_path / "cache")

    streams = at_once([encode] * 4)
    assert len({stream.digest for stream in streams}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def removed_at_touch(number: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Removes a checkpoint before a file in it is touched for that time, as a run in training does."""
    touches = 0
    own = {name: getattr(Path, name) for name in ("stat", "open")}

    def touching(name: str) -> Any:
        def touch(path: Path, *arguments: Any, **options: Any) -> Any:
            nonlocal touches
            if checkpoint in (path, *path.parents):
                touches += 1
                if touches == number:
                    checkpoint.rename(checkpoints.format.partial_path(checkpoint))
            return own[name](path, *arguments, **options)

        return touch

    for name in own:
        monkeypatch.setattr(Path, name, touching(name))
    return lambda: touches >= number


def test_checkpoint_may_be_removed_at_any_moment_of_its_reading(finished: Path) -> None:
    chosen = checkpoints.best_checkpoint(finished)
    outcomes = []
    removed = True
    while removed:
        with pytest.MonkeyPatch.context() as patch:
            came = removed_at_touch(len(outcomes) + 1, chosen, patch)
            outcomes.append(checkpoints.load_with_tokenizer(finished).checkpoint.name)
            removed = came()
        if removed:
            checkpoints.format.partial_path(chosen).rename(chosen)
    assert len(outcomes) > 10
    assert outcomes[-1] == chosen.name not in outcomes[:-1]
