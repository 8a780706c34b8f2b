"""Advice to take fewer threads comes where other programs take cores, and never on a quiet machine."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from lineartime import host
from lineartime.training import contention
from lineartime.training.contention import Contention, Usage, read_usage


@pytest.fixture(autouse=True)
def every_step_is_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "WINDOW", 0.0)


def advice(threads: int, cores: int, windows: Iterable[tuple[float, float]]) -> list[str]:
    """What is said when this process and others use so many cores, one window after the other."""
    readings = [Usage(0.0, 0.0, 0.0)]
    for own, others in windows:
        clock, before, total = readings[-1]
        readings.append(Usage(clock + 5, before + 5 * own, total + 5 * (own + others)))
    unread = iter(readings)
    watch = Contention(threads, read=lambda: next(unread), cores=cores)
    return [said for _ in readings[1:] if (said := watch.advice())]


@pytest.mark.parametrize(
    ("threads", "cores", "own", "others"),
    [
        (2, 2, 2.0, 0.0),
        (2, 2, 0.9, 0.0),  # a small model keeps one thread busy: no reason to warn
        (2, 2, 1.9, 0.4),  # what a quiet machine does besides
        (2, 2, 2.1, -0.1),  # ticks are coarse
        (2, 4, 2.0, 2.0),  # there are cores for all
        (1, 2, 1.0, 2.0),  # one thread waits for no other
    ],
)
def test_a_machine_with_cores_for_all_threads_is_no_reason_to_warn(threads: int, cores: int, own: float, others: float) -> None:
    assert advice(threads, cores, [(own, others)] * 20) == []


@pytest.mark.parametrize(
    ("threads", "cores", "others", "fewer"), [(2, 2, 1.0, 1), (2, 2, 2.0, 1), (16, 16, 4.4, 11), (8, 8, 0.6, 7)]
)
def test_other_programs_on_the_cores_are_told_once_with_what_to_do(threads: int, cores: int, others: float, fewer: int) -> None:
    [said] = advice(threads, cores, [(1.0, others)] * 9)
    assert said.startswith(f"Other programs use {others:.1f} of {cores} cores, so that {threads} threads wait for each other")
    assert said.endswith(f"set threads to {fewer}.")


def test_a_program_that_ends_soon_is_not_told() -> None:
    assert advice(2, 2, [(1.0, 1.0), (2.0, 0.0)] * 5) == []


def test_a_system_that_does_not_tell_its_use_is_left_alone() -> None:
    watch = Contention(2, read=lambda: None, cores=2)
    assert [watch.advice() for _ in range(5)] == [None] * 5


def test_the_processes_of_one_run_are_not_blamed_for_each_other() -> None:
    readings = iter([Usage(0.0, 0.0, 0.0), Usage(5.0, 10.0, 20.5), Usage(10.0, 20.0, 41.0), Usage(15.0, 30.0, 61.5)])
    watch = Contention(2, 2, read=lambda: next(readings), cores=4)
    assert [watch.advice() for _ in range(3)] == [None] * 3


def test_the_use_of_the_cores_that_this_process_may_use_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  900 900 900 900 900 900 900 900 900 900\n"
        "cpu0 100 20 30 5000 600 7 8 9 50 5\n"
        "cpu1 1000 0 0 0 0 0 0 0 0 0\n"
        "cpu10 3000 0 0 0 0 0 0 0 0 0\n"
        "intr 12345\n"
    )
    monkeypatch.setattr(host, "STAT", stat)
    ticks = host.os.sysconf("SC_CLK_TCK")
    assert host.busy_seconds(frozenset({0})) == (100 + 20 + 30 + 7 + 8 + 9) / ticks
    assert host.busy_seconds(frozenset({0, 10})) == (174 + 3000) / ticks
    monkeypatch.setattr(host, "STAT", tmp_path / "nothing")
    assert host.busy_seconds(frozenset({0})) is None
    assert read_usage() is None
