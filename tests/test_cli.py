"""The command line as its users meet it: what it prints, its exit status, and never a traceback."""

import dataclasses
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lineartime
from lineartime.__main__ import main as run_command
from lineartime.bench.config import BenchConfig
from lineartime.checkpoint import best_checkpoint, last_checkpoint, list_checkpoints
from lineartime.cli import EvalConfig, GenerateConfig, main
from lineartime.data.tokenize import TokenizeConfig
from lineartime.models.presets import PAPER_MILLIONS
from lineartime.training.config import TrainConfig

TINY = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context-length", "24", "--batch-size", "2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of its own: the one the tests are started in may hold runs already."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a finished run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("".join(f"the square of {i} is {i * i}, and so on.\n" for i in range(400)))
    assert main(["train", *options(folder), "--out", str(folder / "run"), "--steps", "4", "--eval-every", "2"]) == 0
    return folder


def options(folder: Path) -> list[str]:
    return [
        *TINY,
        "--data",
        str(folder / "text.txt"),
        "--cache",
        str(folder / "cache"),
        "--precision",
        "fp32",
        "--eval-windows",
        "2",
    ]


def lineartime_process(*arguments: str, **keywords: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lineartime", *arguments]
    # What runs in the background of a shell ignores interrupts, and so would its children.
    keywords.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(command, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE, **keywords)  # type: ignore[call-overload,no-any-return]


def fails(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], status: int = 1) -> None:
    """The command ends with a status and a message on standard error, of one sentence if it is ours."""
    capsys.readouterr()
    try:
        found = main(arguments)
    except SystemExit as error:
        found = int(error.code or 0)
    shown = capsys.readouterr().err
    assert found == status
    assert re.search(message, re.sub(r"[\s│╭╮╰╯─]+", " ", shown)), shown
    assert "Traceback" not in shown
    if status == 1:
        assert shown.startswith("error: ") or "\nerror: " in shown
        assert len(shown[shown.index("error: ") :].strip().splitlines()) == 1


def test_training_leaves_a_checkpoint_metrics_scalars_and_a_curve(folder: Path) -> None:
    names = {path.name for path in (folder / "run").iterdir()}
    assert {"metrics.jsonl", "tensorboard", "loss.png", "step-00000004"} <= names


def test_eval_prints_all_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for context in ("windowed", "carried"):
        assert main(["eval", str(folder / "run"), "--context", context, "--cache", str(folder / "cache")]) == 0
        shown = capsys.readouterr().out
        for word in (
            "the test split of",
            "nats per token",
            "bits per byte",
            "perplexity",
            "per word",
            "loss by position",
            context.rstrip("ed"),
        ):
            assert word in shown
    assert re.search(r"│ +16 to 31 │ +\d\.\d{4} │ +\d+ │", shown)


def test_eval_prints_json_for_other_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(folder / "run"), "--json", "--cache", str(folder / "cache")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert sum(position["count"] for position in result["by_position"]) == result["tokens"]


def test_eval_takes_other_text_and_another_split(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "other.txt"
    other.write_text("something else\n" * 100)
    arguments = ["eval", str(folder / "run"), "--data", str(other), "--split", "train", "--cache", str(folder / "cache")]
    assert main([*arguments, "--max-tokens", "100", "--context-length", "10", "--stride", "5"]) == 0
    shown = capsys.readouterr().out
    assert "the train split of" in shown
    assert "100 tokens" in shown
    assert "windows of 10 tokens, one every 5, the last 5 tokens of each counted" in shown


def test_generate_continues_the_prompt_and_repeats_itself_with_a_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(folder / "run"), "--prompt", "the square", "--max-tokens", "30", "--seed", seed]) == 0
        shown.append(capsys.readouterr().out)
    assert all(text.startswith("the square") for text in shown)
    assert shown[0] == shown[1] != shown[2]


def test_presets_lists_sizes_operations_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "flash-base", "transformer-tiny", "linformer-tiny", "--context-length", "1030"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["flash-base"][:5] == ["112.0", "M", "24", "x", "768"]
    flops, state, unit = lines["flash-base"][5:8]
    assert 224 < float(flops) < 300  # two for each parameter but the embedding's and the bias tables', and attention
    assert (state, unit) == ("62.9", "MB")
    assert lines["transformer-tiny"][5].endswith("*")  # reads 1,024
    assert lines["linformer-tiny"][5].endswith("*")  # reads 512
    assert lines["linformer-tiny"][6] == "none"


def test_presets_are_all_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "tiny", "--context-length", "64"]) == 0
    shown = capsys.readouterr().out
    for name in lineartime.presets("mlm"):
        assert not name.endswith("-tiny") or re.search(rf"^ *{re.escape(name)} ", shown, re.MULTILINE), name
    assert "Combiner, rowmajor-axial" in shown


def test_presets_verify_compares_sizes_with_the_paper(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["presets", "gau", "--verify"]) == 0
    assert re.search(r"gau-ungated-ablation[ │|]+130,687,233[ │|]+131 M[ │|]+yes", capsys.readouterr().out)
    monkeypatch.setitem(PAPER_MILLIONS, "gau-ablation", 104)
    fails(["presets", "gau", "--verify"], "not as large as in the paper: gau-ablation", capsys)


def test_reading_beyond_what_a_model_can_ends_in_a_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument for argument in options(folder) if not argument.startswith(("d_qk", "chunk_size"))]
    arguments[arguments.index("n_blocks=1")] = "max_positions=30"
    run = str(tmp_path / "learned")
    assert main(["train", "--preset", "transformer-tiny", *arguments, "--out", run, "--steps", "1"]) == 0
    message = (
        r"There are \d+ tokens in the test split of .*, but this model reads at most 30 in one sequence: evaluate in windows"
    )
    fails(["eval", run, "--context", "carried", "--cache", str(folder / "cache")], message, capsys)
    message = "--context-length is 40, but this model reads at most 30 tokens"
    fails(["eval", run, "--context-length", "40", "--cache", str(folder / "cache")], message, capsys)
    message = "--prompt and --max-tokens make 31 tokens to read, but this model reads at most 30: ask for fewer"
    fails(["generate", run, "--prompt", "the ", "--max-tokens", "28", "--temperature", "0"], message, capsys)
    assert main(["generate", run, "--prompt", "the ", "--max-tokens", "27", "--temperature", "0"]) == 0


def test_a_model_without_absolute_positions_can_be_asked_for(folder: Path, tmp_path: Path) -> None:
    arguments = options(folder)
    arguments[arguments.index("n_blocks=1")] = "absolute_position=none"
    assert main(["train", *arguments, "--out", str(tmp_path / "none"), "--steps", "1"]) == 0
    assert lineartime.load(tmp_path / "none").config.absolute_position == "none"


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("train", TrainConfig),
        ("eval", EvalConfig),
        ("generate", GenerateConfig),
        ("bench", BenchConfig),
        ("tokenize", TokenizeConfig),
    ],
)
def test_every_option_has_a_help_text(command: str, config: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = re.sub(r"[\s│╭╮╰╯─]+", " ", capsys.readouterr().out)
    helped = re.findall(r"[\w)][.] \((?:default: |required)|dropout=0.1 \(default", text)
    assert len(helped) == len(dataclasses.fields(config))


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        ([], "", 2),
        (["fly"], "fly", 2),
        (["train", "--steps", "many"], "--steps", 2),
        (["train", "--stepz", "3"], "--stepz", 2),
        (["train", "--task", "qa"], "--task", 2),
        (["train", "--override", "a=1", "--override", "b=2"], "--override is given twice", 1),
        (["train", "--out", ""], "--out is empty: give a path", 1),
        (["train", "--data", ""], "--data is empty: give a path", 1),
        (["train", "--warmup-steps", "600"], "--warmup-steps is 600, but must be below --steps = 600", 1),
        (["train", "--steps", "0"], "--steps is 0, but must be at least 1", 1),
        (["train", "--recipe", "lm-moon"], "--recipe", 2),
        (["train", "--recipe", "lm-pg19", "--like", "{run}"], "--like and --recipe cannot go together", 1),
        (["train", "--like", "/does/not/exist"], "/does/not/exist does not exist: give the folder of a run", 1),
        (["train", "--track", "paper"], "--track", 2),
        (["train", "--tokenizer", "bpe-100", "--data", "{text}"], "--tokenizer is bpe-100, but bpe needs at least 258", 1),
        (["train", "--preset", "flash-giant"], "--preset: preset is 'flash-giant', but must be a name that .* lists", 1),
        (["train", "--preset", "linformer-tiny"], "--preset: linformer-tiny cannot be a causal model: every landmark mixes", 1),
        (
            ["train", "--preset", "transformer-tiny", "--context-length", "2000"],
            "--context-length is 2000, but transformer-tiny reads at most 1024 tokens: .* --override max_positions=2000",
            1,
        ),
        (
            ["train", "--preset", "linformer-tiny", "--task", "mlm", "--context-length", "513"],
            "--context-length is 513, but linformer-tiny reads at most 512 tokens: .* --override max_length=513",
            1,
        ),
        (["presets", "zebra"], "no preset has zebra in its name", 1),
        (["presets", "--context-length", "0"], "--context-length is 0, but must be at least 1", 1),
        (["presets", "reformer", "--verify"], "the paper counts the parameters of none of these", 1),
        (["bench", "flash-giant"], "preset is 'flash-giant', but must be a name that .* lists", 1),
        (["bench", "--dtypes", "fp8"], "--dtypes", 2),
        (["bench", "--peers", "nobody"], "--peers", 2),
        (["bench", "--tokens-per-batch", "0"], "--tokens-per-batch is 0, but must be at least 1", 1),
        (["bench", "--out", ""], "--out is empty: give a path", 1),
        (["train", "--override", "chunk=3"], "--override: 'chunk' is not a field", 1),
        (["train", "--data", "/does/not/exist"], "Cannot read /does/not/exist: No such file", 1),
        (["eval", "/does/not/exist"], "/does/not/exist does not exist: give the folder of a run", 1),
        (["eval", "{run}", "--stride", "99"], "--stride is 99, but must be from 1 to context_length = 24", 1),
        (["eval", "{run}", "--batch-size", "0"], "--batch-size is 0", 1),
        (["eval", "{run}", "--stride", "0"], "--stride is 0", 1),
        (["eval", "{run}", "--context", "carried", "--stride", "3"], "--stride is for --context windowed", 1),
        (["generate", "{run}", "--temperature", "-1"], "--temperature is -1.0, but must not be negative", 1),
        (["generate", "{run}", "--top-p", "2"], "--top-p is 2.0", 1),
        (["generate", "{run}", "--prompt", "\udcff"], "--prompt is not UTF-8 text", 1),
        (["generate", "{run}", "--seed", "-5"], "--seed is -5, but must be from 0", 1),
        (["generate", "{run}", "--max-tokens", "0"], "--max-tokens is 0", 1),
        (["train", "--out", "{run}", "--data", "{text}"], "already holds a run: go on with it by --resume", 1),
        (["train", "--out", "{run}", "--resume", "--steps", "9"], "--steps is 9, but the run .* was started with 4", 1),
        (["train", "--out", "{run}/nothing", "--resume"], "does not exist: give the folder of a run", 1),
        (["train", "--out", "{text}"], "--out .*text.txt is a file: give a folder", 1),
    ],
)
def test_wrong_input_is_answered_with_the_option_and_what_it_allows(
    arguments: list[str], message: str, status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": str(folder / "run"), "text": str(folder / "text.txt")}
    fails([argument.format(**places) for argument in arguments], message, capsys, status)


def test_text_that_is_not_utf8_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.txt").write_bytes(b"fine\n" * 100 + b"\xff" + b"fine\n" * 100)
    arguments = ["train", "--data", str(tmp_path / "bad.txt"), "--cache", str(folder / "cache"), "--out", str(tmp_path / "run")]
    fails(arguments, r"bad.txt is not UTF-8 text \(byte 0xff at offset 500\)", capsys)
    (tmp_path / "empty.txt").touch()
    arguments[2] = str(tmp_path / "empty.txt")
    fails(arguments, "--data is .*empty.txt, which holds no text", capsys)
    (tmp_path / "empty.txt").write_text("short")
    fails(
        arguments,
        r"There are 5 tokens in the train split of .*, fewer than a context and the token after it \(513\): give more text",
        capsys,
    )


def test_a_masked_model_cannot_generate_or_carry(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["train", *options(folder), "--out", run, "--steps", "1", "--task", "mlm"]) == 0
    assert main(["eval", run]) == 0
    assert " per masked token" in capsys.readouterr().out
    fails(["generate", run], "is a masked language model, which cannot generate: train with --task clm", capsys)
    fails(["eval", run, "--context", "carried"], "--context carried needs a causal model", capsys)


def test_a_damaged_checkpoint_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(folder), "--out", str(run), "--steps", "1"]) == 0
    file = best_checkpoint(run) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    for arguments in (["eval", str(run)], ["generate", str(run)]):
        fails(arguments, r"The checkpoint .* is damaged \(model.safetensors is not what was written\)", capsys)
    assert main(["train", "--out", str(run), "--resume"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is damaged (model.safetensors is not what was written): going on from step-00000000." in said
    assert main(["eval", str(run)]) == 0


def test_options_of_the_machine_can_be_changed_to_what_is_usual(folder: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    given = ["--recompute", "--max-skipped", "3", "--parallel", "fsdp"]
    assert main(["train", *options(folder), "--out", run, "--steps", "1", *given]) == 0
    asked = ["--no-recompute", "--max-skipped", "10", "--parallel", "ddp"]  # the values that nobody need ask for
    assert main(["train", "--out", run, "--resume", *asked]) == 0
    changed = json.loads((tmp_path / "run" / "run.json").read_text())["processes"][1]["changed_options"]
    assert {name: changed.get(name) for name in ("recompute", "max_skipped", "parallel")} == {
        "recompute": False,
        "max_skipped": 10,
        "parallel": "ddp",
    }


@pytest.mark.parametrize("content", ["?", '{"step": 1}'])
def test_a_damaged_last_checkpoint_is_gone_back_from_whatever_of_it_is_damaged(
    folder: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(folder), "--out", str(run), "--steps", "2", "--eval-every", "1"]) == 0
    (last_checkpoint(run) / "training.json").write_text(content)
    assert main(["train", "--out", str(run), "--resume"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "is damaged (training.json is not what was written): going on from step-00000001." in said


def test_a_refused_run_leaves_the_picture_of_the_other_one_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = folder / "run" / "loss.png"
    before = picture.read_bytes()
    fails(["train", "--out", str(folder / "run"), "--model", "transformer++-tiny"], "already holds a run", capsys)
    assert picture.read_bytes() == before


def test_a_run_can_be_repeated_with_one_thing_changed(folder: Path, tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    assert main(["train", *options(folder), "--out", str(first), "--steps", "3", "--seed", "4"]) == 0
    assert main(["train", "--like", str(first), "--out", str(again)]) == 0
    assert main(["train", "--like", str(first), "--out", str(other), "--seed", "5"]) == 0

    def losses(run: Path) -> list[str]:
        return re.findall(r'"loss": ([^,]*)', (run / "metrics.jsonl").read_text())

    assert len(losses(first)) == 3
    assert losses(again) == losses(first)
    assert losses(other) != losses(first)
    assert json.loads((other / "run.json").read_text())["options"]["seed"] == 5


@pytest.mark.slow
def test_killed_at_any_moment_a_run_can_be_loaded_and_resumed(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["train", *options(folder), "--out", str(run), "--steps", "100000", "--eval-every", "1"]

    def wait_for_a_checkpoint(process: "subprocess.Popen[str]", before: list[Path]) -> None:
        while list_checkpoints(run)[-1:] == before[-1:]:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)

    for kill in range(3):
        before = list_checkpoints(run)
        process = lineartime_process(*arguments, *(["--resume"] if kill else []))
        wait_for_a_checkpoint(process, before)
        time.sleep(0.13 * kill)  # another moment each time
        process.kill()
        process.communicate()
        assert lineartime.load(run).config.d_model == 16
        assert lineartime.load(last_checkpoint(run))
    before = list_checkpoints(run)
    process = lineartime_process("train", "--out", str(run), "--resume")
    wait_for_a_checkpoint(process, before)
    process.send_signal(signal.SIGTERM)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 0, shown
    assert f"which is saved: go on by lineartime train --resume --out {run}" in shown
    steps = [int(step) for step in re.findall(r'"step": (\d+), "loss"', (run / "metrics.jsonl").read_text())]
    assert steps == list(range(1, len(steps) + 1))  # no step is missing, none is there twice


@pytest.mark.slow
def test_a_disk_that_is_full_ends_in_a_sentence_and_leaves_the_last_good_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", *options(folder), "--out", str(run), "--steps", "1"]) == 0
    good = last_checkpoint(run)

    def fill_the_disk() -> None:  # no file may grow beyond 20 kB, as if there were no space for more
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    process = lineartime_process(
        "train", *options(folder), "--out", str(tmp_path / "other"), "--steps", "1", preexec_fn=fill_the_disk
    )
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 1, shown
    assert re.search(r"error: Cannot write the checkpoint .*step-00000000", shown), shown
    assert "Traceback" not in shown
    assert lineartime.load(good)


def test_an_interrupt_while_everything_is_still_being_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, lineartime.__main__; print('torch' in sys.modules)"  # the handler is there before what takes long
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lineartime.cli.main", interrupted)
    assert run_command() == 130


@pytest.mark.slow
def test_text_appears_as_it_is_produced(folder: Path) -> None:
    for seed in range(10):  # a text may end its document before it can be interrupted, which is no fault
        process = lineartime_process("generate", str(folder / "run"), "--max-tokens", "1000000", "--seed", str(seed))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), True)
        assert os.read(process.stdout.fileno(), 1)  # long before the millionth token
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
        if process.returncode != 0:
            break
    assert process.returncode == 130
    assert "Traceback" not in shown
