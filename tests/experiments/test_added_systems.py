"""Systems that `add` brings into an experiment, also those of the user."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.cli import main
from lineartime.errors import ArgumentError
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.plan import make_plan
from lineartime.models.registering import VARIABLE, register_system

Options = Callable[..., ReproduceConfig]
OWN = """
import lineartime
from lineartime.baselines.kernel_attention import KernelAttention

class Own(KernelAttention):
    name = "own"
    def features(self, x):
        return x.relu() + 0.001

lineartime.register_system("own", Own, "mlp")
"""


class Relu(KernelAttention):
    """Linear attention with features relu(x), and a text that may hold anything."""

    name = "relu"

    def __init__(self, d_model: int, *, label: str = "", **options: Any) -> None:
        super().__init__(d_model, **options)
        self.label = label

    def features(self, x: Tensor) -> Tensor:
        return x.relu() + 0.001


def test_an_added_system_may_have_other_options(options: Options) -> None:
    plan = make_plan(options(add=("flash:chunk_size=8:token_shift=true", "flash", "flash:chunk_size=8:token_shift=true")))
    assert [each.arm.name for each in plan.candidates] == ["flash", "transformer++", "flash:chunk_size=8:token_shift=true"]
    added = plan.candidates[-1]
    assert (added.model.mixer.options["chunk_size"], added.model.mixer.options["token_shift"]) == (8, True)
    assert added.folder.name == "flash-chunk_size=8-token_shift=true"
    assert added.arm.seeds == 2


def test_what_cannot_be_added_is_named(options: Options) -> None:
    for name, item, message in (
        ("lm", "own", r"^add has 'own', but 'own' is no system: use one of `presets\(\)`, or import the module"),
        ("lm", "flash:chunks=8", "^add has 'flash:chunks=8', but chunks is not an option"),
        ("lm", "flash:d_model=64", "^add has 'flash:d_model=64', but d_model is the same, or follows from the parameters"),
        ("lm", "linformer", "^add has 'linformer', but system is linformer, which cannot be causal"),
        ("latency", "combiner", "^add is given, but this experiment measures all its models together"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_plan(options(name, add=(item,)))


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards", "tiny")
def test_it_imports_modules_of_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    arguments = ["lm", "--scale", "trial", "--list", "--add", "own", "--systems", "own", "--import", "own.py"]
    assert main(["reproduce", *arguments]) == 0
    assert "own-tiny" in capsys.readouterr().out
    assert os.environ[VARIABLE] == str(tmp_path / "own.py")  # so that the processes of runs import it, too


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards")
def test_added_systems_never_share_a_folder(options: Options) -> None:
    register_system("relu", Relu, "mlp")
    with pytest.raises(ArgumentError, match=r"^add has 'relu:label=a-b', whose folder would be that of 'relu:label=a b'"):
        make_plan(options(add=("relu:label=a b", "relu:label=a-b")))
