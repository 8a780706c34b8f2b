"""`lineartime info`: what is said of this machine is what would run on it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lineartime import info
from lineartime.cli import main
from lineartime.info import explain_machine
from lineartime.native import why_not_native
from lineartime.ops.backends import choose_backend


def test_it_tells_the_backend_that_runs_and_why_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = {fact.name: fact for fact in explain_machine()}
    chosen = choose_backend("auto", ("torch", "tiled", "triton"), torch.empty(0), torch.float32, "relu2")
    assert facts["attention, fp32"].value == chosen == "tiled"
    assert facts["attention, fp32"].why.startswith("not triton: ")
    assert facts["device"].value == "cpu"


def test_package_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "is_installed", lambda package: False)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["matplotlib"] == {"value": "not installed", "why": "pip install 'lineartime[plot]'"}


def test_it_tells_the_size_of_the_cache_and_what_may_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fact = next(fact for fact in explain_machine() if fact.name == "cache")
    assert fact.value == "0 B"
    (tmp_path / "lineartime" / "text").mkdir(parents=True)
    with (tmp_path / "lineartime" / "text" / "tokens").open("wb") as file:
        file.truncate(1_300_000_000)  # sparse
    fact = next(fact for fact in explain_machine() if fact.name == "cache")
    assert (fact.value, str(tmp_path / "lineartime") in fact.why) == ("1.3 GB", True)


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="C++ functions need Linux and g++")
@pytest.mark.skipif(os.environ.get("LINEARTIME_NATIVE") == "0", reason="they are turned off")
def test_functions_in_c_plus_plus_are_built_where_there_is_a_compiler() -> None:
    """Otherwise, all tests of these functions would be skipped, and every model would be slower, unseen."""
    assert why_not_native() is None
