"""Exported programs compute what the model computes, for any batch and length, read back from their files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnxruntime
import pytest
import torch
from tests.definitions import noisy
from tests.layers.test_mixer_contract import CASES, D_MODEL
from tests.layers.test_mixer_contract import build as layer_of
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.export import STATE, export_step, export_text, write_onnx, write_package, write_program
from lineartime.machine import compiler_missing
from lineartime.models.language_model import CausalLM, LanguageModel

# PyTorch's own, within torch.export, where a user does not see them.
pytestmark = pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")

SMALL = {"d_model": 16, "n_blocks": 1, "vocab_size": 40}
Stepping = tuple[CausalLM, ExportedProgram]
Reading = Callable[[str], tuple[LanguageModel, ExportedProgram]]
CLIENT = """
import sys, torch
file, given, results, *texts = sys.argv[1:]
program, ids = torch.export.load(file), torch.load(given)
state = [x[:1].repeat(3, *[1] * (x.dim() - 1)) for x in program.example_inputs[0][1]]  # zeros: three new streams
step, logits = program.module(), []
for token in range(ids.shape[1]):
    out, state = step(ids[:, token : token + 1], state)
    logits.append(out)
torch.save(torch.cat(logits, 1).detach(), results)
for file in texts:
    torch.export.load(file).module()(torch.zeros(1, 256, dtype=int))
assert "lineartime" not in sys.modules
"""


def build(preset: str, **overrides: object) -> Any:
    torch.manual_seed(0)
    return noisy(lineartime.build(preset, **{**SMALL, **overrides}).eval(), 0.2)


def flash(**overrides: object) -> CausalLM:
    return build("flash-next-tiny", **{"d_qk": 8, "chunk_size": 8, "token_shift": True, **overrides})


@pytest.fixture(scope="module")
def stepping() -> Stepping:
    """A model and the program of its step."""
    model = flash(n_blocks=2)
    return model, export_step(model)


def test_program_leaves_the_state_that_it_was_given(stepping: Stepping) -> None:
    _, program = stepping
    step, (_, state) = program.module(), program.example_inputs[0]
    for _ in range(9):  # beyond a chunk
        before = [x.clone() for x in state]
        _, after = step(torch.tensor([[3], [4]]), state)
        assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))
        state = after


TEXTS: dict[str, tuple[str, dict[str, object]]] = {
    "flash-next-tiny": ("clm", {"d_qk": 8, "chunk_size": 8, "token_shift": True}),
    "flash-quad-tiny": ("clm", {"d_qk": 8}),
    "transformer++-tiny": ("mlm", {"n_heads": 2}),
}
SIZES = ((1, 9), (3, 8), (3, 16), (2, 75))  # a chunk and a token; a chunk; two; several and a rest


@pytest.fixture(scope="module")
def reading() -> Reading:
    """A model of a preset, and the program that reads its texts."""

    @cache
    def read(preset: str) -> tuple[LanguageModel, ExportedProgram]:
        task, options = TEXTS[preset]
        model = build(preset, task=task, **options)
        # A compiled model is exported as it is itself.
        return model, export_text(model if task == "clm" else torch.compile(model, backend="eager"))

    return read


def batch(preset: str, size: tuple[int, int]) -> tuple[Tensor, ...]:
    """Ids and, for a masked language model, a mask."""
    ids = torch.randint(0, 40, size)
    return (ids, torch.rand(size) > 0.3) if TEXTS[preset][0] == "mlm" else (ids,)


def run_onnx(session: onnxruntime.InferenceSession, *inputs: Tensor) -> list[Tensor]:
    names = [given.name for given in session.get_inputs()]
    outputs = session.run(None, dict(zip(names, [x.numpy() for x in inputs], strict=True)))
    return [torch.from_numpy(out) for out in outputs]


@pytest.mark.parametrize("preset", TEXTS)
def test_program_of_a_text_reads_other_batch_sizes_and_lengths(preset: str, reading: Reading, tmp_path: Path) -> None:
    model, exported = reading(preset)
    program = torch.export.load(write_program(exported, tmp_path / "text.pt2")).module()
    for size in SIZES:
        inputs = batch(preset, size)
        torch.testing.assert_close(program(*inputs), model(*inputs), atol=1e-5, rtol=0)


def test_program_of_a_quantized_model_holds_int8_and_gives_its_logits(tmp_path: Path) -> None:
    model = build("flash-tiny", d_model=64, d_qk=8, chunk_size=8)
    model.quantize()
    program, ids = export_text(model), torch.randint(0, 40, (2, 20))
    held = {name: tensor for name, tensor in program.state_dict.items() if tensor.numel() > 1000}
    assert {tensor.dtype for tensor in held.values()} == {torch.int8}
    assert sum(tensor.numel() for tensor in held.values()) == 64 * (40 + 2 * 128 + 8 + 128)
    read = torch.export.load(write_program(program, tmp_path / "text.pt2")).module()
    with torch.no_grad():
        torch.testing.assert_close(read(ids), model(ids), atol=1e-5, rtol=0)
        stepping = export_step(model)
        step, (_, state) = stepping.module(), stepping.example_inputs[0]
        for place in range(10):
            logits, state = step(ids[:, place : place + 1], state)
            torch.testing.assert_close(logits[:, 0], model(ids)[:, place], atol=1e-5, rtol=0)
    assert all(type(weight) is nn.Parameter and weight.requires_grad for weight in model.parameters())  # it stays as it was


@pytest.mark.nightly
def test_programs_run_without_lineartime(stepping: Stepping, reading: Reading, tmp_path: Path) -> None:
    (model, program), ids = stepping, torch.randint(0, 40, (3, 20))
    files = [write_program(program, tmp_path / "new" / "step.pt2"), tmp_path / "ids", tmp_path / "logits"]
    torch.save(ids, files[1])
    files += [write_program(reading(name)[1], tmp_path / f"{name}.pt2") for name in TEXTS if TEXTS[name][0] == "clm"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", CLIENT, *map(str, files)], check=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(files[2]), model(ids), atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("preset", TEXTS)
def test_text_in_onnx_gives_the_logits_of_the_model(preset: str, reading: Reading, tmp_path: Path) -> None:
    model, exported = reading(preset)
    session = onnxruntime.InferenceSession(str(write_onnx(exported, tmp_path / "text.onnx")))
    shapes = {given.name: given.shape for given in session.get_inputs()}
    assert shapes == {name: ["batch", "length"] for name in ("ids", "mask")[: len(batch(preset, (1, 1)))]}
    with torch.no_grad():
        for size in SIZES:
            inputs = batch(preset, size)
            torch.testing.assert_close(run_onnx(session, *inputs)[0], model(*inputs), atol=1e-4, rtol=0)


class Layers(nn.ModuleList):
    """The outputs of layers that read the same input, side by side."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([layer(x, mask) for layer in self], -1)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["flash", "gau"])
def test_layers_with_every_option_are_the_same_in_onnx(kind: str, tmp_path: Path) -> None:
    names = [name for name in CASES if name.split(",")[0] in (kind, f"{kind}-foreign") and "memory" not in name]
    layers = Layers(layer_of(name, causal=index % 2 == 0, token_shift=index == 0) for index, name in enumerate(names))
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=8, max=128)}

    def given(batch: int, length: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, length, D_MODEL), torch.rand(batch, length) > 0.3

    program = torch.export.export(layers, given(2, 30), dynamic_shapes=(sizes, sizes))
    session = onnxruntime.InferenceSession(str(write_onnx(program, tmp_path / "layers.onnx")))
    with torch.no_grad():
        for batch, length in SIZES:
            inputs = given(batch, length)
            torch.testing.assert_close(run_onnx(session, *inputs)[0], layers(*inputs), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalLM, Path]:
    """A model and the package of its step, which takes long to compile."""
    model = flash(vocab_size=258)
    return model, write_package(export_step(model), tmp_path_factory.mktemp("package") / "step.pt2")


@pytest.mark.nightly
@pytest.mark.skipif(compiler_missing(torch.device("cpu")) != "", reason="torch.compile has no compiler here")
def test_package_of_the_step_gives_the_logits_of_the_model(packaged: tuple[CausalLM, Path]) -> None:
    (model, file), ids = packaged, torch.randint(0, 258, (3, 20))
    package = torch._inductor.aoti_load_package(str(file))
    state: list[Tensor] = [
        torch.zeros(3, *x["shape"][1:], dtype=getattr(torch, x["dtype"])) for x in json.loads(package.get_metadata()[STATE])
    ]
    logits = []
    for token in ids.split(1, 1):
        out, state = package(token.contiguous(), state)
        logits.append(out)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits, 1), model(ids), atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.skipif(compiler_missing(torch.device("cpu")) != "", reason="torch.compile has no compiler here")
def test_program_in_c_plus_plus_of_the_docs_continues_a_text(packaged: tuple[CausalLM, Path], tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    page = (root / "docs" / "export.md").read_text()
    build = page[page.index("    g++") : page.index("   # TORCH")].replace("-O2", "-O0")
    build = build.replace("examples/step.cpp", str(root / "examples" / "step.cpp"))
    environment = {**os.environ, "TORCH": str(Path(torch.__file__).parent)}
    subprocess.run(["bash", "-c", build], cwd=tmp_path, env=environment, check=True)
    model, file = packaged
    command = [str(tmp_path / "step"), str(file), "def f", "20"]
    shown = subprocess.run(command, check=True, capture_output=True).stdout
    text = list(b"def f")
    with torch.no_grad():
        while len(text) < 25:
            text.append(int(model(torch.tensor([text]))[0, -1, :256].argmax()))
    assert len(set(text[5:])) > 1
    assert shown == bytes(text) + b"\n"


@pytest.mark.nightly
@pytest.mark.slow
def test_step_in_onnx_gives_the_logits_of_the_model(stepping: Stepping, tmp_path: Path) -> None:
    (model, program), ids = stepping, torch.randint(0, 40, (3, 20))
    session = onnxruntime.InferenceSession(str(write_onnx(program, tmp_path / "step.onnx")))
    assert [file.name for file in tmp_path.iterdir()] == ["step.onnx"]
    dtypes = {"tensor(float)": torch.float32, "tensor(int64)": torch.int64}
    state, logits = [torch.zeros(3, *x.shape[1:], dtype=dtypes[x.type]) for x in session.get_inputs()[1:]], []
    for token in ids.split(1, 1):
        out, *state = run_onnx(session, token, *state)
        logits.append(out)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(logits, 1), model(ids), atol=1e-4, rtol=0)


# Errors, of a program that takes no time to make ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> ExportedProgram:
    return torch.export.export(nn.Linear(1, 1), (torch.zeros(1),))


def test_onnxscript_that_is_of_another_time_or_missing_is_named(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = ModuleNotFoundError("No module named 'onnxscript._framework_apis.torch_2_11'")
    monkeypatch.setattr(torch.onnx, "export", Mock(side_effect=lacks))
    with pytest.raises(LineartimeError, match=r"too old or too new for PyTorch .* \(ModuleNotFoundError: .*pip install -U"):
        write_onnx(small, tmp_path / "step.onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(LineartimeError, match=r"needs onnxscript, which is not installed: pip install 'lineartime\[onnx\]'"):
        write_onnx(small, tmp_path / "step.onnx")


def test_mixer_is_blamed_for_errors_of_tracing_but_not_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, message in (
        (ValueError("odd"), r"a program of FLASH for every .* \(ValueError: odd"),
        (MemoryError("full"), "full"),
    ):
        monkeypatch.setattr(torch.export, "export", Mock(side_effect=error))
        with pytest.raises((LineartimeError, MemoryError), match=message):
            export_step(flash())


def test_programs_that_onnx_cannot_hold_are_refused(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = torch.export.export(nn.Linear(1, 1, dtype=torch.bfloat16), (torch.zeros(1, dtype=torch.bfloat16),))
    with pytest.raises(LineartimeError, match="bfloat16 has operations that onnxruntime lacks: export it in float32"):
        write_onnx(narrow, tmp_path / "text.onnx")
    monkeypatch.setattr(lineartime.export, "MAX_ONNX_BYTES", 1)
    with pytest.raises(LineartimeError, match=r"at most 0.0 GiB of weights in a file, .*: export the model in float16"):
        write_onnx(small, tmp_path / "step.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_mixers_that_cannot_be_traced_or_translated_are_named(tmp_path: Path) -> None:
    with pytest.raises(LineartimeError, match=r"torch.export cannot make a program of Reformer for every batch size"):
        export_text(build("reformer-tiny", n_heads=2))
    with pytest.raises(LineartimeError, match=r"PyTorch cannot translate .* into ONNX .*: FLASH with the memory sum, GAU"):
        write_onnx(export_text(build("flash-tiny", d_qk=8, memory="mesa")), tmp_path / "text.onnx")
    assert list(tmp_path.iterdir()) == []


def test_models_and_files_that_cannot_be_exported_are_refused(small: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="model is made of GAU, which has no step with a state of constant size"):
        export_step(build("flash-quad-tiny", d_qk=8))
    with pytest.raises(ArgumentError, match="masked language model, which cannot continue a text"):
        export_step(build("flash-tiny", task="mlm"))
    with pytest.raises(ArgumentError, match=r"file is .*step.zip, but must end in .pt2"):
        write_program(small, tmp_path / "step.zip")
    with pytest.raises(ArgumentError, match=r"program reads whole texts, but must be one of steps"):
        write_package(small, tmp_path / "step.pt2")
