"""`lineartime fill`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lineartime.cli import main

Fails = Callable[..., None]


def test_a_masked_model_shows_candidates_for_each_mask(
    masked: str, folder: Path, capsys: pytest.CaptureFixture[str], fails: Fails
) -> None:
    capsys.readouterr()
    arguments = ["fill", masked, "--text", "the [MASK] of [MASK]"]
    assert main([*arguments, "--top", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["masks"]
    assert [len(candidates) for candidates in found] == [2, 2]
    assert found[0][0]["probability"] >= found[0][1]["probability"] > 0
    assert main([*arguments, "--top", "258"]) == 0
    shown = capsys.readouterr().out
    assert "mask 1 of 2" in shown
    assert "mask 2 of 2" in shown
    for readable in ('"a"', '" "', r'"\n"', r'"\xc3"', '"[MASK]"', '"[END]"'):
        assert shown.count(f" {readable} ") == 2, readable
    fails(["fill", masked, "--text", "the of"], r"--text is 'the of', which holds no \[MASK\]")
    fails([*arguments, "--top", "0"], "--top is 0, but must be at least 1")
    fails(["fill", masked], "--text", status=2)
    fails(["fill", str(folder / "run"), "--text", "[MASK]"], "model is a causal language model, which cannot fill masks")
