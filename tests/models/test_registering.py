"""Systems of a user: registered in this process, and imported by the command line and by other processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lineartime
from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.cli import main
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers.flash import FLASH
from lineartime.layers.mixer import Mixer
from lineartime.models.config import KINDS, LayerConfig
from lineartime.models.systems import PRESETS, SYSTEMS, VARIABLE, register_system
from lineartime.ops.packing import Packing
from lineartime.training.config import TrainConfig

FILE = """
from lineartime.training.loop import train
from torch import Tensor
import lineartime
from lineartime.baselines.kernel_attention import KernelAttention

class Cubed(KernelAttention):
    '''Linear attention with features relu(x)^3.'''
    name = "cubed"
    def features(self, x: Tensor) -> Tensor:
        return x.relu() ** 3 + 0.001

lineartime.register_system("cubed", Cubed, "mlp")
used = lineartime.train, lineartime.evaluate
"""
SMALL = {"d_model": 16, "n_blocks": 1, "n_heads": 2}


class Squared(KernelAttention):
    """Linear attention with features relu(x)^2.

    Args:
        floor: added to the features.
        powers: not used.
    """

    name = "squared"

    def __init__(
        self, d_model: int, *, floor: float = 0.001, powers: tuple[tuple[int, ...], ...] = (), label: str = "", **options: Any
    ) -> None:
        super().__init__(d_model, **options)
        self.floor, self.powers, self.label = floor, powers, label

    def features(self, x: Tensor) -> Tensor:
        return x.relu() ** 2 + self.floor


class Unnamed(FLASH):
    """FLASH with the name of FLASH."""


class Incomplete(KernelAttention):
    """Without features."""

    name = "incomplete"


def with_option(option: str, hint: Any, **default: Any) -> type[Mixer]:
    """A mixer with an option of a type."""
    names: dict[str, Any] = {"Squared": Squared, "hint": hint, **default}
    value = " = default" if default else ""
    exec(
        f"class Own(Squared):\n    name = 'own'\n    def __init__(self, d_model, *, {option}: hint{value}, **options):\n"
        "        Squared.__init__(self, d_model, **options)",
        names,
    )
    own: type[Mixer] = names["Own"]
    return own


pytestmark = pytest.mark.usefixtures("only_systems_of_the_library_afterwards")


def test_registered_system_is_built_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    scaled = {"floor": lambda size: 1 / size.d_model}
    register_system("squared+", Squared, "glu", options={"label": "a"}, scaled=scaled, fields={"norm": "rmsnorm"})
    assert lineartime.presets()["squared+-base"].mixer.options["n_heads"] == 12
    options = lineartime.presets()["squared+-tiny"].mixer.options
    assert (options["floor"], options["label"]) == (1 / 256, "a")
    model = lineartime.build("squared+-tiny", **SMALL, floor=0.25, powers=[[1], [2, 3]]).eval()
    mixer = model.backbone.blocks[0].mixer  # type: ignore[index]
    assert (type(mixer), mixer.floor, mixer.powers, model.config.norm) == (Squared, 0.25, ((1,), (2, 3)), "rmsnorm")
    lineartime.save(model, lineartime.data.ByteTokenizer(), tmp_path / "saved")
    loaded, ids = lineartime.load(tmp_path / "saved"), torch.randint(0, 256, (1, 40))
    assert loaded.config == model.config
    torch.testing.assert_close(loaded(ids), model(ids))
    with pytest.raises(ArgumentError, match=r"powers\[0\]\[0\] is 'a', but must be an integer"):
        lineartime.build("squared+-tiny", powers=[["a"]])


def test_hybrid_is_registered_with_a_pattern_and_learns_what_its_mixers_can() -> None:
    fields = {"pattern": ("squared", LayerConfig("flash", d_qk=16), "linformer")}
    register_system("squared-hybrid", Squared, "mlp", options={"floor": 0.5}, fields=fields)
    assert "squared-hybrid-tiny" not in lineartime.presets()
    config = lineartime.presets("mlm")["squared-hybrid-tiny"]
    assert [mixer.kind for mixer in config.pattern] == ["squared", "flash", "linformer"]
    assert (config.mixer.options["floor"], config.pattern[1].options["d_qk"]) == (0.5, 16)
    with pytest.raises(ArgumentError, match=r"^pattern\[1\].kind is 'nothing', which is not known here"):
        register_system("other", Squared, fields={"pattern": ("squared", "nothing")})


def test_class_that_is_defined_again_replaces_the_first() -> None:
    """As when a cell of a notebook is run again."""
    for _ in range(2):

        class Again(Squared):
            name = "again"

        register_system("again", Again, "mlp")
    assert type(lineartime.build("again-tiny", **SMALL).backbone.blocks[0].mixer) is Again  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "mixer", "options", "message"),
    [
        ("flash", Squared, {}, r"^name is 'flash', which is a system of the library"),
        ("Mine", Squared, {}, r"^name is 'Mine', but must begin with a-z"),
        ("mine", torch.nn.Linear, {}, r"^mixer is <class .*Linear'>, but must be a class derived from lineartime.layers.Mixer"),
        ("mine", Incomplete, {}, r"^mixer is Incomplete, of which no model can be built .*method '?features"),
        ("mine", Unnamed, {}, r"^mixer is Unnamed, whose name, 'flash', is that of FLASH: give the class an attribute `name`"),
        ("mine", with_option("kind", str, default="soft"), {}, r"^mixer is Own, whose option kind .* of the model: rename it"),
        ("mine", with_option("expansion", int, default=2), {"feed_forward": "mlp"}, r"^mixer is Own, .* of the feed-forward"),
        ("mine", with_option("sizes", list[int], default=[1]), {}, r"^mixer is Own, of which no model can .*mixer.sizes"),
    ],
)
def test_wrong_systems_are_named_and_leave_nothing(
    name: str, mixer: type[Mixer], options: dict[str, Any], message: str
) -> None:
    before = dict(SYSTEMS), dict(PRESETS), dict(KINDS["mixer"])
    with pytest.raises(ArgumentError, match=message):
        register_system(name, mixer, **options)
    assert (SYSTEMS, PRESETS, KINDS["mixer"]) == before


def test_command_line_imports_a_file_and_other_processes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = str(tmp_path / "mine.py"), str(tmp_path / "run")
    Path(file).write_text(FILE)
    (tmp_path / "text.txt").write_text("some text to learn\n" * 200)
    small = ["--steps", "2", "--context-length", "16", "--eval-windows", "2", "--compile", "off", "--cache", str(tmp_path)]
    size = ["--override", *(f"{name}={value}" for name, value in SMALL.items()), "--max-time", "1e-6"]
    data = ["--data", str(tmp_path / "text.txt"), "--out", run]
    assert main(["train", "--preset", "cubed-tiny", *small, *data, "--import", file, *size]) == 0
    assert os.environ[VARIABLE] == file  # so that processes that a command starts import it, too
    assert f"resume by: lineartime train --resume --out {run} --import {file}\n" in capsys.readouterr().err
    assert main(["train", "--resume", "--max-time", "9", "--out", run, "--import", file]) == 0
    assert main(["generate", run, "--max-tokens", "3", f"--import={file}"]) == 0
    # Another process knows the system by the variable alone.
    command = [sys.executable, "-m", "lineartime", "generate", run, "--max-tokens", "3"]
    subprocess.run(command, env={**os.environ, VARIABLE: file}, check=True, capture_output=True)


def test_failing_imports_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    missing = "Cannot import broken (ModuleNotFoundError: No module named 'broken'): write broken"
    failing = "broken.py (ZeroDivisionError: division by zero, line 2 of "
    for arguments, message in ((["--import", "broken", "presets"], missing), (["presets", "--import", "broken.py"], failing)):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


class Leaky(Squared):
    """Reads the token after each token."""

    name = "leaky"

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        return super().read(x.roll(-1, 0), packing, state)


class Unstreamed(Squared):
    """Cannot stream yet."""

    name = "unstreamed"

    def read(self, x: Tensor, packing: Packing, state: Any = None) -> tuple[Tensor, Any]:
        if state is not None:
            raise NotImplementedError("later")
        return super().read(x, packing)


def test_mixer_that_breaks_a_promise_is_not_trained_or_noted(
    config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for mixer in (Leaky, Unstreamed):
        register_system(mixer.name, mixer, "mlp")
    options = {"override": tuple(f"{name}={value}" for name, value in SMALL.items()), "steps": 2}
    with pytest.raises(LineartimeError, match=r"^Leaky breaks a promise of every mixer: outputs do not depend on later tokens"):
        lineartime.train(config(preset="leaky-tiny", **options))
    lineartime.train(config(preset="unstreamed-tiny", **options))
    note = "Unstreamed breaks a promise of every mixer: streams continue in any pieces as the whole text is read. But it fails"
    assert note in " ".join(capsys.readouterr().err.split())
