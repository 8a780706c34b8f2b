"""Sizes that no machine has, and weights that are not the model's: each ends at once, in one sentence."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import lineartime
from lineartime import checkpoint as checkpoints
from lineartime import machine
from lineartime.checkpoint import is_checkpoint
from lineartime.cli import main
from lineartime.data import ByteTokenizer
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.files import sha256
from lineartime.models import language_model, memory
from lineartime.models.config import ModelConfig
from lineartime.models.presets import presets, resolve
from lineartime.training import setup
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train
from lineartime.training.setup import check_start

SMALL = {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}
OPTIONS: dict[str, Any] = {
    "override": SMALL,
    "context_length": 16,
    "batch_size": 2,
    "eval_windows": 2,
    "steps": 4,
    "track": (),
    "device": "cpu",
    "precision": "fp32",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("Some words, and a few more of them.\n" * 200)
    return file


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return train(**OPTIONS, data=str(text), cache=folder / "cache", out=folder / "run").run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return lineartime.save(lineartime.build("flash-tiny", **SMALL), ByteTokenizer(), tmp_path / "model")


@pytest.fixture
def nothing_built(run: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, no model is built but that of the run: one of these sizes would take all memory."""
    build, known = language_model.build_model, [lineartime.load(folder).config for folder in (run, saved)]

    def build_known(config: ModelConfig) -> Any:
        return build(config) if config in known else pytest.fail(f"a model of {config} is built")

    for module in (language_model, setup):
        monkeypatch.setattr(module, "build_model", build_known)


# Sizes ----------------------------------------------------------------------------------------------------------------

TOO_LARGE: list[tuple[str, str, str]] = [
    *[
        (f"train --override {name}={value}", "--override", name)
        for name, values in {
            "n_blocks": (10**6, 10**23),
            "d_model": (10**20, 10**7),
            "d_qk": (10**9,),
            "expansion": (10**6,),
            "chunk_size": (10**20,),
            "vocab_size": (10**30,),
        }.items()
        for value in values
    ],
    *[
        (f"train --{name} {value}", f"--{name} is {value}", "must be")
        for name, values in {
            "steps": (10**23, 0),
            "batch-size": (10**23,),
            "tokens-per-batch": (10**12, -5),
            "context-length": (10**12,),
            "eval-every": (10**23,),
            "eval-windows": (10**23,),
            "lanes": (10**9,),
            "threads": (10**9, 0),
            "warmup-steps": (10**23,),
            "clip-tokens": (10**23,),
            "max-skipped": (10**23,),
            "seed": (10**30,),
            "timeout": ("nan",),
            "learning-rate": ("inf", "-1.0", "1e+36"),
            "adamw-ratio": ("1000000.0",),
            "beta1": ("2.0",),
            "weight-decay": ("inf",),
        }.items()
        for value in values
    ],
    (f"train --batch-size {2**25}", "--batch-size puts", "GB"),
    ("train --batch-size 1 --context-length 16000000", "--context-length puts 16,000,000 tokens in memory at once", "GB"),
    (f"train --context {2**29}", "--context-length puts 536,870,912 tokens", "GB"),  # even one sequence is too long
    *[
        (f"eval RUN --{name} {value}", f"--{name} is {value}", "must be")
        for name in ("batch-size", "context-length", "stride", "max-tokens", "threads")
        for value in (10**23,)
    ],
    *[
        (f"generate RUN --prompt x --{name} {value}", f"--{name} is {value}", "must be")
        for name, values in {"samples": (10**12,), "seed": (10**30,), "max-tokens": (0,)}.items()
        for value in values
    ],
]


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize(("command", "argument", "what"), TOO_LARGE, ids=[case[0][:50] for case in TOO_LARGE])
def test_a_size_that_no_machine_has_is_refused_at_once(
    command: str,
    argument: str,
    what: str,
    run: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 32 * 10**9)
    arguments = [str(run) if word == "RUN" else word for word in command.split()]
    if arguments[0] == "train":
        arguments += [
            "--data",
            str(text),
            "--cache",
            str(tmp_path),
            "--out",
            str(tmp_path / "out"),
            "--device",
            "cpu",
            "--track",
        ]
    begin = time.perf_counter()
    assert main(arguments) == 1
    assert time.perf_counter() - begin < 60  # 2 on a machine that does nothing else
    shown = capsys.readouterr().err
    [error] = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert argument in error
    assert what in error
    assert len(error) < 600
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("nothing_built")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n_blocks", value) for value in (10**9, 2)),
        *(("d_model", value) for value in (10**20, 32)),
        *(("vocab_size", value) for value in (10**9, 259)),
        ("d_qk", 10**9),
    ],
)
def test_a_description_that_the_weights_do_not_fit_takes_no_memory(saved: Path, name: str, value: int) -> None:
    description = json.loads((saved / "model.json").read_text())
    (description["mixer"] if name == "d_qk" else description)[name] = value
    (saved / "model.json").write_text(json.dumps(description))
    (saved / "manifest.json").unlink()
    with pytest.raises(LineartimeError, match=r"model.json describes no model|is damaged") as caught:
        lineartime.load(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("preset", ["flash-tiny", "transformer-tiny", "performer-tiny", "mc-tfm++-tiny", "gau-multi-head-tiny"])
def test_the_size_of_a_model_is_that_of_its_tensors(preset: str) -> None:
    config = resolve(preset, n_blocks=3)
    tensors = lineartime.build(config).state_dict()
    found = memory.model_tensors(config)
    assert found.n_tensors == len(tensors)
    assert found.n_elements == sum(tensor.numel() for tensor in tensors.values())
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tensor.shape for name, tensor in tensors.items()}


def test_a_chunk_longer_than_the_context_is_no_memory(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 10**9)
    result = lineartime.train(
        data=text, out=tmp_path / "out", cache=tmp_path, steps=1, context_length=64, eval_windows=1,
        override={"n_blocks": 1, "d_model": 16, "chunk_size": 2**20},
    )  # fmt: skip
    assert result.finished


def test_every_preset_of_a_laptop_is_allowed_on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 4 * 10**9)
    for name, config in presets("clm").items():
        if name.endswith("-tiny"):
            memory.check_memory(config, copies=4, tokens=4 * 512, kept_blocks=config.n_blocks)


@pytest.mark.parametrize(
    ("values", "option"), [({"n_blocks": 5000}, "n_blocks is 5,000"), ({"vocab_size": 10**8}, "vocab_size is 100,000,000")]
)
def test_the_option_that_makes_a_model_too_large_is_named(
    values: dict[str, Any], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 4 * 10**9)
    with pytest.raises(ArgumentError, match=f"^{option}, with which the model has"):
        memory.check_memory(resolve("flash-base", **values))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            {"sequences": 4, "tokens": 4 * 2**20},
            "^context_length puts 1,048,576 tokens in memory .* least 5.7\\d* GB",
        ),
        ({"sequences": 4, "tokens": 4 * 2**18}, "^batch_size puts 1,048,576 tokens in memory .* least 5.7\\d* GB"),
        ({"sequences": 1, "tokens": 2**10, "step_tokens": 2**28}, "^tokens_per_batch puts 268,435,456 tokens .* 4.35 GB"),
    ],
)
def test_the_option_that_puts_too_many_tokens_in_memory_is_named(
    tokens: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda device: 4 * 10**9)
    with pytest.raises(ArgumentError, match=message):
        memory.check_memory(resolve("flash-tiny"), copies=4, **tokens)


# Weights --------------------------------------------------------------------------------------------------------------


def weights_changed(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


NAME = "backbone.embedding.weight"
WEIGHTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a NaN": (
        weights_changed(lambda w: w[NAME].view(-1)[5:6].fill_(float("nan"))),
        f"{NAME} holds numbers that are not finite",
    ),
    "an infinity": (weights_changed(lambda w: w[NAME].view(-1)[5:6].fill_(float("-inf"))), "not finite"),
    "integers": (weights_changed(lambda w: w.update({NAME: w[NAME].int()})), f"{NAME} is of type I32, but must be one of F64"),
    "booleans": (weights_changed(lambda w: w.update({NAME: w[NAME].bool()})), f"{NAME} is of type BOOL"),
    "complex": (weights_changed(lambda w: w.update({NAME: w[NAME].to(torch.complex64)})), "C64"),
    "8 bits": (weights_changed(lambda w: w.update({NAME: w[NAME].to(torch.float8_e4m3fn)})), "F8_E4M3"),
    "another shape": (weights_changed(lambda w: w.update({NAME: w[NAME].T.contiguous()})), "has the shape [16, 258], but"),
    "a scalar": (weights_changed(lambda w: w.update({NAME: torch.tensor(1.0)})), "has the shape []"),
    "one less": (weights_changed(lambda w: w.pop(NAME)), "but a model of n_blocks = 1 has"),
    "one more": (weights_changed(lambda w: w.update({"x": torch.zeros(1)})), "but a model of n_blocks = 1 has"),
    "another name": (
        weights_changed(lambda w: w.update({"x": w.pop(NAME)})),
        "has the tensor 'x', which the model does not have",
    ),
    "another block": (
        weights_changed(lambda w: w.update({"backbone.blocks.7.mixer.gamma": w.pop("backbone.blocks.0.mixer.gamma")})),
        "'backbone.blocks.7.mixer.gamma', which the model does not have",
    ),
    "nothing": (lambda folder: (folder / "model.safetensors").write_bytes(b"") and None, "model.safetensors: "),
    "rubbish": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99) and None, "model.safetensors: "),
    "a long header": (
        lambda folder: (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}") and None,
        "model.safetensors: ",
    ),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_are_not_the_models_are_named(saved: Path, kind: str) -> None:
    spoil, what = WEIGHTS[kind]
    spoil(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(LineartimeError) as caught:
        lineartime.load(saved)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_not_read_from_another_type(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    model = lineartime.build("bigbird-tiny", vocab_size=tokenizer.vocab_size, n_blocks=1, n_heads=2)
    saved = lineartime.save(model, tokenizer, tmp_path / "model")
    weights_changed(lambda weights: weights.update({"backbone.blocks.0.mixer.seeds": torch.zeros(2)}))(saved)
    write_checksums(saved)
    with pytest.raises(LineartimeError, match=r"blocks.0.mixer.seeds is of type F32, but must be integers"):
        lineartime.load(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_precision_are_read(saved: Path, dtype: torch.dtype) -> None:
    weights_changed(lambda w: w.update({name: tensor.to(dtype) for name, tensor in w.items()}))(saved)
    (saved / "manifest.json").unlink()
    assert lineartime.load(saved).backbone.embedding.weight.dtype == torch.float32


# The optimiser's part, and weights alone ------------------------------------------------------------------------------


def moments(run: Path) -> Path:
    return next((checkpoints.last_checkpoint(run) / "optimizer").iterdir())


def moments_changed(change: Callable[[torch.Tensor], torch.Tensor], prefix: str = "exp_avg") -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        from safetensors import safe_open

        with safe_open(moments(run), "pt") as opened:
            tensors, facts = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        save_file({n: change(t) if n.startswith(prefix) else t for n, t in tensors.items()}, moments(run), facts)

    return spoil


MOMENTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "rubbish": (lambda run: moments(run).write_bytes(b"\xff" * 99) and None, "is damaged, or of another optimiser ("),
    "nothing": (lambda run: moments(run).write_bytes(b"") and None, "is damaged, or of another optimiser ("),
    "no file": (lambda run: moments(run).unlink(), "is damaged, or of another optimiser ("),
    "another shape": (moments_changed(lambda t: torch.zeros(3)), "is damaged, or of another optimiser ("),
    "a NaN": (moments_changed(lambda t: t * float("nan")), "holds numbers that are not finite"),
    "negative squares": (moments_changed(lambda t: t * 0 - 1, "exp_avg_sq"), "holds negative squares"),
}


def write_checksums(checkpoint: Path) -> None:
    """Make the manifest say that the files are as they were written."""
    files = [file for file in checkpoint.rglob("*") if file.is_file() and file.name != "manifest.json"]
    manifest = {file.relative_to(checkpoint).as_posix(): sha256(file) for file in files}
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 1, **manifest}))


@pytest.mark.parametrize("kind", ["a NaN", "another shape", "nothing"])
def test_a_run_whose_weights_are_not_its_models_is_not_resumed(run: Path, tmp_path: Path, kind: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    last = checkpoints.last_checkpoint(copy)
    spoil, what = WEIGHTS[kind]
    spoil(last)
    write_checksums(last)
    for earlier in checkpoints.list_checkpoints(copy)[:-1]:
        shutil.rmtree(earlier)
    with pytest.raises(LineartimeError) as caught:
        train(out=copy, resume=True)
    assert str(caught.value).startswith(f"The checkpoint {last} is damaged (")
    assert what in str(caught.value)


def test_a_position_in_the_text_that_is_not_that_of_the_steps_is_damage(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    last = checkpoints.last_checkpoint(copy)
    state = json.loads((last / "training.json").read_text())
    state["data"]["rows"] += 1
    (last / "training.json").write_text(json.dumps(state))
    write_checksums(last)
    with pytest.raises(LineartimeError, match=r"json is damaged \(data.rows is \d+, but \d+ steps read \d+\): restore"):
        train(out=copy, resume=True)


@pytest.mark.parametrize("kind", MOMENTS)
def test_a_damaged_optimiser_says_how_its_weights_can_be_used(run: Path, tmp_path: Path, kind: str) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    last = checkpoints.last_checkpoint(copy)
    spoil, what = MOMENTS[kind]
    spoil(copy)
    write_checksums(last)
    with pytest.raises(LineartimeError) as caught:
        train(out=copy, resume=True)
    assert what in str(caught.value)
    assert f"init_from='{last}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_starts_from_the_weights_of_another_with_its_own_schedule(run: Path, tmp_path: Path, text: Path) -> None:
    rest = {
        "data": str(text),
        "cache": tmp_path / "cache",
        "context_length": 16,
        "track": (),
        "device": "cpu",
        "eval_windows": 2,
    }
    new = train(init_from=run, out=tmp_path / "new", steps=2, learning_rate=1e-9, precision="fp32", **rest)
    old = lineartime.load(run)
    assert new.model.config == old.config
    assert torch.allclose(new.model.backbone.embedding.weight, old.backbone.embedding.weight, atol=1e-6)
    assert new.step == 2
    resumed = train(out=tmp_path / "new", resume=True)
    assert resumed.finished


@pytest.mark.parametrize("place", ["run", "checkpoint", "saved", "damaged optimizer", "no training state"])
def test_weights_are_taken_from_whatever_holds_a_model(
    run: Path, saved: Path, tmp_path: Path, text: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    last = checkpoints.last_checkpoint(copy)
    if place == "damaged optimizer":
        moments(copy).write_bytes(b"?")
    if place == "no training state":
        (last / "training.json").unlink()
        (last / "manifest.json").unlink()
    start = {"run": copy, "saved": saved}.get(place, last)
    out = tmp_path / "new"
    result = train(init_from=start, data=str(text), cache=tmp_path / "c", context_length=16, steps=1, track=(), out=out)
    assert result.finished
    assert is_checkpoint(result.checkpoint)


def test_a_tokenizer_that_is_not_the_models_is_refused_even_if_it_has_the_same_size(text: Path, tmp_path: Path) -> None:
    tiny = {"d_model": 16, "n_blocks": 1, "d_qk": 8, "chunk_size": 8}
    options: dict[str, Any] = {"context_length": 16, "steps": 1, "cache": tmp_path / "c", "track": (), "tokenizer": "bpe-270"}
    first = train(data=str(text), out=tmp_path / "first", override=tiny, **options).run
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} other words of another text\n" for i in range(900)))
    with pytest.raises(ArgumentError, match="tokenizer is bpe-270, but the model of `init_from` has learnt the tokens"):
        train(init_from=first, data=str(other), out=tmp_path / "other", **options)
    assert train(init_from=first, data=str(text), out=tmp_path / "second", **options).finished


def test_weights_that_do_not_fit_the_model_that_is_asked_for_are_named(run: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"context_length": 16, "out": tmp_path / "new", "track": ()}
    options["data"] = str(tmp_path / "unread.jsonl")  # which is not read before the model is known to fit
    Path(options["data"]).write_text("?" * 100)
    other = {
        "d_model": ({"override": {"d_model": 32, "dropout": 0.1}}, "override sets d_model to 32, .* has 16: leave it out"),
        "preset": ({"preset": "transformer++-tiny"}, "preset is transformer..-tiny, .* is flash-tiny: leave it out"),
        "trained": ({"tokenizer": "bpe-500"}, "tokenizer is bpe-500, which has 500 tokens, .* has 258: leave it out"),
        "unknown": ({"tokenizer": "none"}, "tokenizer is none, which is neither a file nor a name"),
    }
    for asked, message in other.values():
        with pytest.raises(ArgumentError, match=f"^{message}"):
            train(init_from=run, **asked, **options)
    with pytest.raises(LineartimeError, match=r"unread.jsonl, line 1, is not JSON"):
        train(init_from=run, override={"dropout": 0.1}, tokenizer="bytes", **options)
    with pytest.raises(LineartimeError, match="init_from starts a new run, and cannot be combined with `resume`"):
        train(init_from=run, resume=True, out=run)
    for option in ("init_from", "like"):
        with pytest.raises(ArgumentError, match=f"^{option} is .*missing, which does not exist: give the folder of a run"):
            train(**{option: tmp_path / "missing"}, **options)
    assert not (tmp_path / "new").exists()


def test_a_preset_of_another_size_than_the_weights_is_refused_whatever_overrides_make_of_it(
    run: Path, text: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": str(text), "cache": tmp_path / "c", "context_length": 16, "steps": 1, "track": ()}
    with pytest.raises(ArgumentError, match=r"^preset is flash-base, but the model of `init_from` is flash-tiny: leave it out"):
        train(init_from=run, preset="flash-base", out=tmp_path / "base", **options)
    # An override that changes no shapes is one of the new run, also where it makes the model that of another preset.
    other = {"normalization": "paper", "initial_scores": "unit"}
    assert train(init_from=run, override=other, out=tmp_path / "next", **options).finished


def test_weights_fit_the_preset_that_another_one_equals() -> None:
    for preset in ("transformer++-scaling-768", "gau-scaling-768"):
        config = TrainConfig(preset=preset, tokenizer="bytes")
        with mock.patch("lineartime.checkpoint.read_model_config", lambda _, c=config: c.model_config(258)):
            check_start(config, Path("run"))
