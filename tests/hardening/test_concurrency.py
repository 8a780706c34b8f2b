"""Several threads and processes at once on one model, one run or one cache: the same results, or a sentence."""

import shutil
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
from lineartime.cli import main
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


def test_a_thread_may_train_on_while_others_read_a_model(config: Config, tmp_path: Path) -> None:
    model = lineartime.train(config(steps=1)).model
    ids = torch.randint(0, 256, (1, 20))
    with torch.no_grad():
        expected = model(ids)
    ended = threading.Event()

    def train() -> Any:
        try:
            return lineartime.train(config(steps=3, out=tmp_path / "other"))
        finally:
            ended.set()

    def read() -> list[torch.Tensor]:
        results = [model(ids).detach()]
        while not ended.is_set():
            results.append(model(ids).detach())
        return results

    trained, *results = at_once([train, *[read] * 3])
    assert trained.finished
    assert all(torch.equal(result, expected) for of_thread in results for result in of_thread)


def test_of_two_trainings_in_one_folder_one_trains_and_the_other_says_why_not(config: Config) -> None:
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


def removed_while_read(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes a checkpoint after it was chosen, as a run in training does, the first time one is read."""
    check = checkpoints.format.check_weights

    def remove_and_check(file: Path, config: Any) -> None:
        if file.parent.name == name and file.exists():
            shutil.rmtree(file.parent)
        check(file, config)

    monkeypatch.setattr(checkpoints.format, "check_weights", remove_and_check)


@pytest.mark.parametrize("given", ["a run", "its checkpoint"])
def test_a_command_whose_checkpoint_is_removed_goes_on_with_another_or_says_so(
    given: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    best = checkpoints.best_checkpoint(finished)
    removed_while_read(finished, best.name, monkeypatch)
    status = main(["convert", str(finished if given == "a run" else best), str(tmp_path / "converted")])
    screen = capsys.readouterr().err
    assert not best.exists()
    if given == "a run":
        assert status == 0, screen
    else:
        [line] = [line for line in screen.splitlines() if line.startswith("error: ")]
        assert line == f"error: The checkpoint {best} was removed while it was read: give another one."
        assert status == 1


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


def test_a_checkpoint_may_be_removed_at_any_moment_of_its_reading(finished: Path) -> None:
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


def test_a_run_whose_checkpoints_all_vanish_is_no_endless_search(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(checkpoint: Path) -> None:
        raise LineartimeError("gone")

    monkeypatch.setattr(checkpoints, "is_there", lambda path: False)
    with pytest.raises(LineartimeError, match="are removed before they are read: give the folder of one, or copy one"):
        checkpoints.read_from(finished, gone)


@pytest.mark.nightly
def test_a_run_is_measured_again_and_again_while_it_trains(config: Config) -> None:
    trained = config(steps=12, eval_every=1)
    run = trained.run_directory
    ended = threading.Event()
    failures: list[Exception] = []
    measured: list[float] = []

    def measure() -> None:
        while not ended.is_set():
            if checkpoints.list_checkpoints(run):
                try:
                    measured.append(lineartime.evaluate(run, max_tokens=20).loss)
                except Exception as error:
                    failures.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        alone = lineartime.train(config(steps=12, eval_every=1, out=run.with_name("alone")))
        assert lineartime.train(trained).validation_losses == alone.validation_losses
    finally:
        ended.set()
        thread.join()
    assert not failures, failures[:3]
    assert measured
