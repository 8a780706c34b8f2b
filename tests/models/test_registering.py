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
from lineartime.models import registering
from lineartime.models.layer_config import KINDS
from lineartime.models.presets import PRESETS, resolve
from lineartime.models.registering import VARIABLE, import_modules, register_system
from lineartime.models.systems import SYSTEMS
from lineartime.training.config import TrainConfig

FILE = """
from torch import Tensor
import lineartime
from lineartime.baselines.kernel_attention import KernelAttention

class Cubed(KernelAttention):
    '''Linear attention with features relu(x)^3.'''
    name = "cubed"
    def features(self, x: Tensor) -> Tensor:
        return x.relu() ** 3 + 0.001

lineartime.register_system("cubed", Cubed, "mlp")
"""


class Squared(KernelAttention):
    """Linear attention with features relu(x)^2.

    Args:
        floor: added to the features.
    """

    name = "squared"

    def __init__(self, d_model: int, *, floor: float = 0.001, **options: Any) -> None:
        super().__init__(d_model, **options)
        self.floor = floor

    def features(self, x: Tensor) -> Tensor:
        return x.relu() ** 2 + self.floor


class Unnamed(FLASH):
    """FLASH with the name of FLASH."""


class NameOfAnMLP(Squared):
    """With the name of a feed-forward layer."""

    name = "mlp"


class Required(Squared):
    """With an option that has no default."""

    name = "required"

    def __init__(self, d_model: int, *, power: int, **options: Any) -> None:
        super().__init__(d_model, **options)
        self.power = power


class Kind(Squared):
    """With an option that has the name of the record of a layer's name."""

    name = "with-kind"

    def __init__(self, d_model: int, *, kind: str = "soft", **options: Any) -> None:
        super().__init__(d_model, **options)
        self.kind = kind


class Wide(Squared):
    """With an option that a feed-forward layer has, too."""

    name = "wide"

    def __init__(self, d_model: int, *, expansion: int = 2, **options: Any) -> None:
        super().__init__(d_model, **options)
        self.expansion = expansion


class Incomplete(KernelAttention):
    """Without features."""

    name = "incomplete"


pytestmark = pytest.mark.usefixtures("only_systems_of_the_library_afterwards")


def test_a_registered_system_is_built_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    register_system("squared+", Squared, "glu", options={"floor": 0.5}, fields={"norm": "rmsnorm"})
    assert {"squared+-tiny", "squared+-base"} <= set(lineartime.presets())
    model = lineartime.build("squared+-tiny", d_model=16, n_blocks=1, n_heads=2, floor=0.25).eval()
    mixer = model.backbone.blocks[0].mixer  # type: ignore[index]
    assert (type(mixer), mixer.floor, model.config.norm) == (Squared, 0.25, "rmsnorm")
    lineartime.save(model, lineartime.data.ByteTokenizer(), tmp_path / "saved")
    loaded, ids = lineartime.load(tmp_path / "saved"), torch.randint(0, 256, (1, 40))
    torch.testing.assert_close(loaded(ids), model(ids))


def test_sizes_of_the_model_reach_the_mixer() -> None:
    register_system("squared", Squared, "mlp", scaled={"floor": lambda size: 1 / size.d_model})
    assert lineartime.presets()["squared-tiny"].mixer.options["floor"] == 1 / 256
    assert lineartime.presets()["squared-base"].mixer.options["n_heads"] == 12


def test_a_class_that_is_defined_again_replaces_the_first() -> None:
    """As when a cell of a notebook is run again."""

    def cell() -> type[Mixer]:
        class Again(Squared):
            name = "again"

        return Again

    register_system("again", cell(), "mlp")
    second = cell()
    register_system("again", second, "mlp")
    assert type(lineartime.build("again-tiny").backbone.blocks[0].mixer) is second  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "mixer", "options", "message"),
    [
        ("flash", Squared, {}, r"^name is 'flash', which is a system of the library"),
        ("Mine", Squared, {}, r"^name is 'Mine', but must begin with a-z"),
        ("mine", torch.nn.Linear, {}, r"^mixer is <class .*Linear'>, but must be a class derived from lineartime.layers.Mixer"),
        ("mine", Incomplete, {}, r"^mixer is Incomplete, which cannot be built .*: .*method '?features"),
        ("mine", Unnamed, {}, r"^mixer is Unnamed, whose name, 'flash', is that of FLASH: give the class an attribute `name`"),
        ("mine", Squared, {"feed_forward": "moe"}, r"^feed_forward is 'moe', but must be one of 'mlp', 'glu'"),
        ("mine", Squared, {"options": {"flor": 1.0}}, r"^flor is not an option of Squared .did you mean floor"),
        ("mine", Squared, {"fields": {"depth": 3}}, r"^'?depth'? is not an option of fields, which has"),
        ("mine", Squared, {"options": [("floor", 1.0)]}, r"^options is .*, but must be"),
        ("mine", Squared, {"scaled": {"floor": lambda size: size.depth}}, r"^scaled has a function for floor that fails: Attr"),
        ("mine", Kind, {}, r"^mixer is Kind, whose option kind has the name of one of the model: rename it"),
        ("mine", Wide, {"feed_forward": "mlp"}, r"^mixer is Wide, whose option expansion has the name of one of the feed-forw"),
        ("mine", NameOfAnMLP, {}, r"^mixer is NameOfAnMLP, whose name, 'mlp', is that of MLP"),
        ("mine", Required, {}, r"^mixer is Required, which cannot be built with these options: .*power"),
    ],
)
def test_what_cannot_be_registered_is_named_and_leaves_nothing(
    name: str, mixer: type[Mixer], options: dict[str, Any], message: str
) -> None:
    before = dict(SYSTEMS), dict(PRESETS), dict(KINDS["mixer"])
    with pytest.raises(ArgumentError, match=message):
        register_system(name, mixer, **options)
    assert (SYSTEMS, PRESETS, KINDS["mixer"]) == before


def test_the_command_line_imports_a_file_and_says_how_where_it_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "text.txt").write_text("some text to learn\n" * 200)
    small = ["--steps", "2", "--context-length", "16", "--eval-windows", "2", "--compile", "off", "--cache", str(tmp_path)]
    size = ["--override", "d_model=16", "n_blocks=1", "n_heads=2"]
    data = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    mine = ["--import", str(tmp_path / "mine.py")]
    assert main(["train", "--preset", "cubed-tiny", *small, *data, *mine, *size, "--max-time", "1e-6"]) == 0
    assert (
        f"resume by: lineartime train --resume --out {tmp_path / 'run'} --import {tmp_path / 'mine.py'}\n"
        in capsys.readouterr().err
    )
    assert main(["train", "--resume", "--max-time", "9", "--out", str(tmp_path / "run"), *mine]) == 0
    assert main(["generate", str(tmp_path / "run"), "--max-tokens", "3", f"--import={tmp_path / 'mine.py'}"]) == 0
    capsys.readouterr()
    # Another process knows the system by the variable alone.
    command = [sys.executable, "-m", "lineartime", "generate", str(tmp_path / "run"), "--max-tokens", "3"]
    environment = {**os.environ, VARIABLE: str(tmp_path / "mine.py")}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    without = subprocess.run(command, env={**environment, VARIABLE: ""}, capture_output=True, text=True)
    assert without.returncode == 1
    assert "mixer.kind is 'cubed', which is not known here: import the module that registers it, by --import" in without.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["presets", "--import", "no_such_module"], "error: Cannot import no_such_module (ModuleNotFoundError: No module"),
        (
            ["presets", "--import", "broken"],
            "Cannot import broken (ModuleNotFoundError: No module named 'broken'): write broken.py",
        ),
        (["--import", "missing.py", "presets"], "missing.py (FileNotFoundError"),
        (["presets", "--import", "{broken}"], "broken.py (ZeroDivisionError: division by zero, line 2 of "),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    assert main([each.format(broken=tmp_path / "broken.py") for each in arguments]) == 1
    assert message in capsys.readouterr().err


def test_files_of_the_same_name_are_told_apart_and_import_what_is_beside_them(tmp_path: Path) -> None:
    for folder, name in (("a", "cubic"), ("b", "quartic")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"helper_{folder}.py").write_text(f"NAME = '{name}'\n")
        content = FILE.replace('"cubed"', "NAME")
        (tmp_path / folder / "systems.py").write_text(f"from helper_{folder} import NAME\n{content}")
    import_modules([str(tmp_path / folder / "systems.py") for folder in ("a", "b")])
    assert {"cubic-tiny", "quartic-tiny"} <= set(PRESETS)


def test_a_file_may_be_imported_by_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_systems.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    import_modules([str(tmp_path / "named_systems.py"), "named_systems"])  # registers the same class again
    import_modules([str(tmp_path / "named_systems.py")])
    sys.modules.pop("named_systems")


@pytest.mark.parametrize("preset", ["flash-tiny", "transformer++-tiny"])
def test_a_mixer_by_name_has_the_sizes_of_the_preset(preset: str) -> None:
    register_system("squared", Squared, "mlp")
    for mixer in ("squared", "attention", "gau", "combiner"):
        config = lineartime.build(preset, mixer=mixer).config
        options = config.mixer.options
        assert options.get("n_heads", 4) == 4
        assert options.get("d_qk", 64) == 64
        assert options.get("chunk_size", 128) == 128


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("import builtins\nbuiltins.counted = getattr(builtins, 'counted', 0) + 1\n")
    import_modules([str(tmp_path / "counted.py")] * 2)
    import builtins

    assert builtins.__dict__.pop("counted") == 1


def test_a_wrong_variable_is_named() -> None:
    environment = {**os.environ, VARIABLE: "no_such_module"}
    result = subprocess.run([sys.executable, "-c", "import lineartime.models"], env=environment, capture_output=True, text=True)
    assert "LineartimeError: Cannot import no_such_module (ModuleNotFoundError" in result.stderr


@pytest.mark.parametrize("mixer", ["flash-local", {"kind": "flash-local", "chunk_size": 32}])
def test_a_mixer_can_be_overridden_by_its_name_or_as_in_model_json(mixer: Any) -> None:
    config = resolve("flash-tiny", mixer=mixer, d_qk=16)
    expected = 128 if isinstance(mixer, str) else 32
    assert (config.mixer.kind, config.mixer.options["chunk_size"], config.mixer.options["d_qk"]) == (
        "flash-local",
        expected,
        16,
    )


def test_an_unknown_mixer_is_named_with_those_like_it() -> None:
    message = r"^mixer.kind is 'flash-locl' .did you mean flash-local.*, which is not known here: import .*, by `import`"
    with pytest.raises(ArgumentError, match=message):
        resolve("flash-tiny", mixer="flash-locl")
    with pytest.raises(LineartimeError, match=r"^mixer is 5, but must be a LayerConfig, or the name, of one of these kinds"):
        resolve("flash-tiny", mixer=5)


class Powers(KernelAttention):
    """Linear attention with several powers of relu(x)."""

    name = "powers"

    def __init__(
        self,
        d_model: int,
        *,
        powers: tuple[int, ...] = (1, 2),
        label: str | None = None,
        several: tuple[tuple[str, ...], ...] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, **options)
        self.powers, self.label, self.several = powers, label, several

    def features(self, x: Tensor) -> Tensor:
        return torch.stack([x.relu() ** power for power in self.powers]).sum(0) + 0.001


def test_a_tuple_of_options_is_recorded_and_read_back(config: Callable[..., TrainConfig]) -> None:
    register_system("powers", Powers, "mlp")
    result = lineartime.train(config(preset="powers-tiny", override=(*SMALL, "powers=1,3", "label=a")))
    options = lineartime.load(result.run).config.mixer.options
    assert (options["powers"], options["label"]) == ((1, 3), "a")
    for text, expected in (("2", (2,)), ("1,2,", (1, 2))):
        other = config(preset="powers-tiny", override=(*SMALL, f"powers={text}", "label=a,b"), out=result.run / text)
        options = lineartime.load(lineartime.train(other).run).config.mixer.options
        assert (options["powers"], options["label"], options["several"]) == (expected, "a,b", None)
    several = lineartime.build("powers-tiny", several=[["a", "b"], ["c"]], n_blocks=1).config
    assert type(several).from_dict(several.to_dict()) == several
    assert lineartime.build("powers-tiny", powers=[2], n_blocks=1).config.mixer.options["powers"] == (2,)
    with pytest.raises(ArgumentError, match=r"powers\[0\] is 'a', but must be an integer"):
        lineartime.build("powers-tiny", powers=["a"])


def with_option(hint: Any, default: Any) -> type[Mixer]:
    """A mixer with an option `extra` of a type."""

    class Own(Squared):
        name = "own"

        def __init__(self, d_model: int, *, extra: Any = default, **options: Any) -> None:
            super().__init__(d_model, **options)

    Own.__init__.__annotations__["extra"] = hint
    return Own


@pytest.mark.parametrize(
    ("hint", "default", "message"),
    [
        (list[int], None, r"whose option extra is of type list\[int\], but a checkpoint can only record bool, int"),
        (tuple[int, float], (1, 2.0), r"is of type tuple\[int, float\], but"),
        (torch.dtype, torch.float32, r"is of type torch.dtype, but"),
        (Any, torch.float32, r"is torch.float32, which no checkpoint can record"),
        (float, float("inf"), r"is inf, which no checkpoint can record"),
    ],
)
def test_an_option_that_no_checkpoint_can_record_is_named(hint: Any, default: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^mixer is Own, .*{message}"):
        register_system("own", with_option(hint, default), "mlp")


@pytest.mark.parametrize("kind", KINDS["mixer"].values())
def test_the_options_of_the_library_can_all_be_recorded(kind: type[Mixer]) -> None:
    registering._check_options(kind, None, {})


def test_a_module_of_the_environment_can_use_all_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"from lineartime.training.loop import train{FILE}used = lineartime.train, lineartime.evaluate\n"
    )
    (tmp_path / "script.py").write_text(
        "from lineartime.training.loop import train\nimport lineartime\nprint('cubed-tiny' in lineartime.presets())\n"
    )
    environment = {**os.environ, VARIABLE: str(tmp_path / "own.py")}
    run = subprocess.run([sys.executable, tmp_path / "script.py"], env=environment, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("True\n", "")


SMALL = ("d_model=16", "n_blocks=1", "n_heads=2")


class Leaky(Squared):
    """Reads the token after each token."""

    name = "leaky"

    def mix(self, normed: Tensor, batch: Any) -> Tensor:
        return super().mix(normed.roll(-1, 1), batch)


class Unstreamed(Squared):
    """Cannot stream yet."""

    name = "unstreamed"

    def mix_next(self, *_: Any) -> Any:
        raise NotImplementedError("later")


def test_a_mixer_that_reads_later_tokens_is_not_trained(config: Callable[..., TrainConfig]) -> None:
    register_system("leaky", Leaky, "mlp")
    with pytest.raises(LineartimeError, match=r"^Leaky breaks a promise of every mixer: outputs do not depend on later tokens"):
        lineartime.train(config(preset="leaky-tiny", override=SMALL))


def test_another_broken_promise_is_a_note_of_training(
    config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    register_system("unstreamed", Unstreamed, "mlp")
    lineartime.train(config(preset="unstreamed-tiny", override=SMALL))
    note = "Unstreamed breaks a promise of every mixer: streams continue in any pieces as the whole text is read. But it fails"
    assert note in " ".join(capsys.readouterr().err.split())
