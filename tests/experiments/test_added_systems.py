"""Systems that `add` brings into an experiment, also those of the user."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.errors import ArgumentError
from lineartime.experiments.__main__ import main
from lineartime.experiments.config import ReproduceConfig
from lineartime.experiments.folder import with_saved_options
from lineartime.experiments.plan import Job, Plan, make_plan
from lineartime.experiments.report import write_report
from lineartime.experiments.runner import run_all
from lineartime.models.registering import VARIABLE, register_system

Options = Callable[..., ReproduceConfig]
Do = Callable[[Job, dict[str, Any]], int]
OWN = """
import lineartime
from lineartime.experiments.catalogue import EXPERIMENTS
from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.training.loop import train

class Own(KernelAttention):
    name = "own"
    def features(self, x):
        return x.relu() + 0.001

lineartime.register_system("own", Own, "mlp")
"""


class Relu(KernelAttention):
    """Linear attention with features relu(x)."""

    name = "relu"

    def features(self, x: Tensor) -> Tensor:
        return x.relu() + 0.001


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards")
def test_a_system_of_ones_own_joins_the_runs_of_an_experiment(options: Options, here: Do) -> None:
    def run(**values: Any) -> Plan:
        plan = make_plan(with_saved_options(options(seeds=1, **values)))
        assert run_all(plan, lambda _: None, here).problems == ()
        return plan

    register_system("relu", Relu, "mlp")
    run(systems=("transformer++",))
    plan = run(add=("relu", "flash:chunk_size=8"), systems=("relu", "flash:chunk_size=8"))
    file, report, _ = write_report(plan)
    rows = report["settings"][0]["rows"]
    finished = [row["name"] for row in rows if row["runs"][0]["state"] == "finished"]  # type: ignore[typeddict-item]  # of quality
    assert finished == ["transformer++", "relu", "flash:chunk_size=8"]
    text = file.read_text()
    assert "--add relu flash:chunk_size=8" in text
    assert "flash (" not in text[text.index("**Parameters.**") :].split("\n")[0]  # which has no run
    later = make_plan(with_saved_options(options()))  # the folder remembers what was added
    assert [entry.arm.name for entry in later.entries] == ["flash", "transformer++", "relu", "flash:chunk_size=8"]


def test_an_added_system_may_have_other_options(options: Options) -> None:
    plan = make_plan(options(add=("flash:chunk_size=8:token_shift=true", "flash")))
    assert [entry.arm.name for entry in plan.entries] == ["flash", "transformer++", "flash:chunk_size=8:token_shift=true"]
    entry = plan.entries[-1]
    assert (entry.model.mixer.options["chunk_size"], entry.model.mixer.options["token_shift"]) == (8, True)
    assert entry.folder.name == "flash-chunk_size=8-token_shift=true"
    assert entry.arm.seeds == 2


@pytest.mark.parametrize(
    ("name", "item", "message"),
    [
        ("lm", "own", r"^add has 'own', but 'own' is no system: use one of presets\(\), or import the module"),
        ("lm", "flash-tiny", r"^add has 'flash-tiny', but 'flash-tiny' is no system"),
        (
            "lm",
            "flash:chunk_size",
            "^add has 'flash:chunk_size', but override contains 'chunk_size', which is not of the form NAME=VALUE",
        ),
        ("lm", "flash:chunks=8", "^add has 'flash:chunks=8', but chunks is not an option"),
        ("lm", "flash:d_model=64", "^add has 'flash:d_model=64', but d_model is the same, or follows from the parameters"),
        ("lm", "flash:task=mlm", "^add has 'flash:task=mlm', but task is the same"),
        ("lm", "linformer", "^add has 'linformer', but system is linformer, which cannot be causal"),
        ("latency", "combiner", "^add is given, but this experiment measures all its models together"),
    ],
)
def test_what_cannot_be_added_is_named(name: str, item: str, message: str, options: Options) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_plan(options(name, add=(item,)))


class Labelled(Relu):
    """With a text that may hold anything."""

    name = "labelled"

    def __init__(self, d_model: int, *, label: str = "", **options: Any) -> None:
        super().__init__(d_model, **options)
        self.label = label


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards")
def test_systems_are_added_once_and_never_share_a_folder(options: Options) -> None:
    assert len(make_plan(options(add=("flash-global", "flash-global"))).entries) == 3
    register_system("labelled", Labelled, "mlp")
    with pytest.raises(
        ArgumentError, match=r"^add has 'labelled:label=a-b', whose folder would be that of 'labelled:label=a b'"
    ):
        make_plan(options(add=("labelled:label=a b", "labelled:label=a-b")))


@pytest.mark.usefixtures("only_systems_of_the_library_afterwards", "tiny")
def test_the_command_without_packages_of_the_command_line_imports_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    assert main(["lm", "--scale", "trial", "--list", "--add", "own", "--systems", "own", "--import", "own.py"]) == 0
    assert "own-tiny" in capsys.readouterr().out
    assert os.environ[VARIABLE] == str(tmp_path / "own.py")  # so that the processes of runs import it, too
