"""`lineartime reproduce`: wrong input, and what an interrupt says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main
from lineartime.experiments import command
from lineartime.experiments.config import ReproduceConfig

Fails = Callable[..., None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce", "positons"], r"name has 'positons', which is not an experiment here \(did you mean positions\?\)"),
        (["reproduce", "lm", "--rates", "0.001"], "--rates is 0.001, but each optimiser has its own: give one in `optimizers`"),
        (["reproduce", "memory", "--tuning", "3"], "--tuning is 3.0, which memory does not have: leave it out"),
        (["reproduce", "lm", "--systems", "flash-quat"], r"--systems has 'flash-quat'.*\(did you mean flash-quad"),
        (["reproduce", "lm", "--books", "/none"], "--books is /none, which is neither a file or folder"),
        (["reproduce", "--list", "--books", "/none"], "--books is /none, which is neither a file or folder"),
        (["reproduce", "lm", "--report"], "has no runs of lm at the scale cpu: run it first"),
    ],
)
def test_wrong_input_is_one_sentence_with_the_flag(arguments: list[str], message: str, fails: Fails) -> None:
    fails(arguments, message)


def test_interrupt_says_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[ReproduceConfig] = []

    def interrupted(config: ReproduceConfig) -> None:
        asked.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "reproduce", interrupted)
    assert main(["reproduce", "lm", "--books", "a b.txt", "c.txt", "--out", "x"]) == 130
    assert capsys.readouterr().err.strip() == "resume by: lineartime reproduce lm --books 'a b.txt' c.txt --out x"
    assert asked == [ReproduceConfig("lm", books=("a b.txt", "c.txt"), out=Path("x"))]
