"""Several threads at once on one model, one run or one cache: the same results, or a sentence."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import lineartime
from lineartime import Sampling
from lineartime.checkpoint import last_checkpoint
from lineartime.errors import LineartimeError


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """The results of actions that begin at the same moment, each in a thread of its own."""
    barrier = threading.Barrier(len(actions), timeout=60)

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait()
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions))


@pytest.mark.parametrize(
    ("system", "options"),
    [("flash", {}), ("flash-next", {"token_shift": True}), ("flash-quad", {}), ("transformer++", {})],
)
def test_threads_that_generate_from_one_model_get_what_each_would_get_alone(
    system: str, options: dict[str, Any], tiny: Callable[..., Any]
) -> None:
    def text(model: Any, seed: int) -> list[int]:
        prompt = torch.randint(0, 256, (3 + 5 * seed,), generator=torch.Generator().manual_seed(seed))
        return list(lineartime.generate(model, prompt, 30, Sampling(seed=seed)))

    models = [tiny(system, **options).eval() for _ in range(2)]  # the tables of the second are not made yet
    models[1].load_state_dict(models[0].state_dict())
    alone = [text(models[0], seed) for seed in range(4)]
    assert at_once(*[lambda seed=seed: text(models[1], seed) for seed in range(4)]) == alone


def test_trainings_in_one_folder_exclude_each_other(config: Callable[..., Any]) -> None:
    def train() -> Any:
        try:
            return lineartime.train(config(steps=3))
        except LineartimeError as error:
            return str(error)

    *refused, finished = sorted(at_once(train, train, train), key=lambda result: not isinstance(result, str))
    assert all("which another run is using: wait" in said or "already holds a run" in said for said in refused)
    assert finished.finished
    lineartime.load(last_checkpoint(finished.run))
