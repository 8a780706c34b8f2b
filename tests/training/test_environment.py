"""What torchrun tells a process in its environment."""

import pytest

from lineartime.errors import LineartimeError
from lineartime.training.environment import Environment, read_environment

NAMES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("value", ["", "x", "1.5", "-1", "0x2", "99999999999999999999999", "nan", "1 2", "٣"])
@pytest.mark.parametrize("name", [*NAMES, "TORCHELASTIC_RESTART_COUNT"])
def test_what_is_no_number_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(name, value)
    with pytest.raises(LineartimeError) as caught:
        read_environment()
    said = str(caught.value)
    assert said.startswith(f"{name} in the environment is {value[:20]!r}"[:-1])
    assert "must be an integer from" in said
    assert said.endswith("start the processes with torchrun, which sets it, or unset it.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WORLD_SIZE", "0"), ("RANK", "4"), ("LOCAL_RANK", "4"), ("LOCAL_WORLD_SIZE", "5"), ("LOCAL_WORLD_SIZE", "0")),
        *(("GROUP_RANK", "1"), ("GROUP_WORLD_SIZE", "5"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536")),
    ],
)
def test_what_is_out_of_range_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(name, value)
    with pytest.raises(LineartimeError, match=f"^{name} in the environment is '{value}', but must be an integer from"):
        read_environment()


def test_numbers_of_torchrun_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("4", "3", "1", "2", "1", "2", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert read_environment() == Environment(4, 3, 1, 2, 1, 2, 0, 29500)


def test_one_process_alone_is_the_first_whatever_other_programs_have_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert read_environment() == Environment()


def test_the_command_line_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from lineartime.cli import main

    monkeypatch.setenv("WORLD_SIZE", "two")
    assert main(["train", "--steps", "1"]) == 1
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE in the environment is 'two', but must be")
