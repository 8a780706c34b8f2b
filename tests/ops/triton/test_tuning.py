"""What the autotuner tells launches apart by."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import pytest
import torch

from lineartime.ops.backends import GPU_LOCK

common = pytest.importorskip("lineartime.ops.triton.common")


def test_lengths_within_a_bucket_are_tuned_once() -> None:
    buckets = [common.length_bucket(n) for n in (1, 64, 65, 256, 1000, 1024, 1025, 65536)]
    assert buckets == [64, 64, 256, 256, 1024, 1024, 8192, 8192]
    # Triton compiles another kernel for an integer that 16 does not divide, and for 1.
    buckets = [common.length_bucket(n) for n in (1, 100, 1000, 9999)] + [common.token_bucket(n) for n in (1, 9999, 10**6)]
    assert all(bucket % 16 == 0 for bucket in buckets)


class Tuner:
    """Like Triton's: what a call sets is read again later."""

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}

    def run(self, argument: int) -> None:
        self.argument = argument
        time.sleep(0.001)
        assert self.argument == argument, "another thread has changed the arguments of this call"
        self.cache[argument] = argument


def test_threads_that_launch_a_kernel_at_once_do_not_mix_their_arguments_up() -> None:
    tuner: Any = Tuner()
    common._guard(tuner)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(tuner.run, range(40)))
    assert len(tuner.cache) == 40


def test_no_kernel_is_launched_while_another_thread_records_a_graph() -> None:
    tuner: Any = Tuner()
    common._guard(tuner)
    thread = Thread(target=tuner.run, args=(1,))
    with GPU_LOCK:
        thread.start()
        thread.join(0.05)
        assert not tuner.cache
        tuner.run(2)  # as the recorded function does
    thread.join()
    assert set(tuner.cache) == {1, 2}


def test_each_gpu_has_choices_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner: Any = Tuner()
    common._guard(tuner)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        tuner.run(10 + device)
        assert set(tuner.cache) == {10 + device}
    monkeypatch.setattr(common, "TUNERS", [tuner])
    common.pin_configurations(False)
    assert not tuner.cache_of_device
