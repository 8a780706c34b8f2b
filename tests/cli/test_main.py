"""The command line as its users meet it: help, exit statuses, and never a traceback."""

import dataclasses
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from lineartime.__main__ import main as run_command
from lineartime.cli import _COMMANDS as COMMANDS
from lineartime.cli import main
from lineartime.errors import Argument, ArgumentError, Call, LineartimeError

Fails = Callable[..., None]


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """What `main` changes for its process is changed back."""
    handler, format_warning = signal.getsignal(signal.SIGINT), warnings.formatwarning
    yield
    signal.signal(signal.SIGINT, handler)
    warnings.formatwarning = format_warning


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = re.sub(r"[\s│╭╮╰╯─]+", " ", capsys.readouterr().out)
    helped = re.findall(r"[\w)][.] \((?:default: |required|repeatable)|dropout=0.1 \(default", text)
    assert len(helped) == len(dataclasses.fields(import_module(f"lineartime.cli.{command}").Options))


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        ([], "", 2),
        (["fly"], "fly is not a command: use one of train", 2),
        (["trian"], "trian is not a command .did you mean train", 2),
        (["train", "--steps", "many"], "--steps", 2),
        (["train", "--stepz", "3"], "--stepz", 2),
        (["train", "--task", "qa"], "--task", 2),
        (["generate", "run", "--prompt", "a", "--prompt", "b"], "--prompt is given twice: the last one counts.", 1),
        (["generate", "run", "--seed", "1", "--seed=2"], "--seed is given twice: the last one counts.", 1),
        (["generate", "run", "--prompt", "-x y"], "--prompt is followed by -x y, .*: write --prompt='-x y'.", 2),
        (
            ["train", "--override", "a=1", "--override", "b=2"],
            "--override is given twice, .*: give all its values after one.",
            1,
        ),
        (["train", "--override=a=1", "--override=b=2"], "--override is given twice", 1),
        (["generate", "run", "--stop", "a", "--stop=b"], "--stop is given twice", 1),
        (["train", "--track", "tensorboard", "--track", "wandb"], "--track is given twice", 1),
        (["bench", "--context_lengths", "8", "--context-lengths", "16"], "--context-lengths is given twice", 1),
        (["reproduce", "lm", "--books", "a", "--books", "b"], "--books is given twice", 1),
        (["train", "--track", "--steps", "0"], "--steps is 0, but must be at least 1", 1),  # none is a choice here
        (["train", "--override"], "--override has no value: give at least one", 1),
        (["train", "--override", "--steps", "1"], "--override has no value: give at least one", 1),
        (
            ["bench", "--measure", "trian"],
            "--measure contains trian .did you mean train.., but must be one of",
            2,
        ),
        (["bench", "--dtypes", "fp32", "fp16"], "--dtypes contains fp16 .did you mean bf16.., but must be one of auto", 2),
        (["train", "--out", ""], "--out is empty: give a path", 1),
        (["train", "--data", ""], "--data is empty: give a path", 1),
        (["train", "--out="], "--out is empty: give a path", 1),
        (["train", "--warmup-steps", "600"], "--warmup-steps is 600, but must be below --steps 600", 1),
        (["train", "--steps", "0"], "--steps is 0, but must be at least 1", 1),
        (
            ["train", "--recipe", "qiuck"],
            "--recipe is qiuck .did you mean quick.., .* one of quick, lm-wiki40b, lm-pg19, mlm-c4",
            2,
        ),
        (["train", "--recipe=lm-moon"], "--recipe is lm-moon, but must be one of quick, ", 2),
        (["eval", "{run}", "--packed", "of"], "--packed is of.*, but must be one of auto, on, off", 2),
        (["train", "a.txt"], "a.txt is given without an option: write --data a.txt for a text", 2),
        (["tokenize", "a.txt"], "a.txt is given without an option: write --data a.txt for a text", 2),
        (["train", "--resume", "runs/x"], "--resume takes no value, .* write --resume --out runs/x", 2),
        (["train", "--recipe", "lm-pg19", "--like", "{run}"], "--like cannot be combined with --recipe", 1),
        (["train", "--like", "nothing"], "--like is nothing, which does not exist: give the folder of a run", 1),
        (["train", "--init-from", "nothing"], "--init-from is nothing, which does not exist: give the folder of a run", 1),
        (["train", "--track", "paper"], "--track", 2),
        (
            ["train", "--tokenizer", "bpe-100", "--data", "{text}"],
            "--tokenizer is bpe-100, but bpe .* from 258 to 16,777,216",
            1,
        ),
        (
            ["train", "--tokenizer", f"bpe-{10**19}", "--data", "{text}"],
            "--tokenizer is bpe-1000.*, but bpe .* to 16,777,216",
            1,
        ),
        (["train", "--tokenizer", f"bpe-{'9' * 5000}", "--data", "{text}"], "--tokenizer is bpe-9999.*, which is neither", 1),
        (["tokenize", "--data", "{text}", "--vocab-size", str(10**20)], "--vocab-size is 1000.*, but must be at least 258", 1),
        (["train", "--preset", "flash-tyni"], "--preset is 'flash-tyni', which is not a preset .did you mean flash-tiny", 1),
        (["train", "--model", "flash-tyni"], "--model is 'flash-tyni', .* use a name listed by `lineartime presets`", 1),
        (["train", "--model=flash-tyni"], "--model is 'flash-tyni'", 1),
        (["train", "--context", "0"], "--context is 0, but must be at least 1", 1),
        (["train", "--data", "books/*.txt"], "--data is books/.*, which is a pattern: .* books, with --include '.*.txt'", 1),
        (["train", "--data", "wiki40bb"], "--data is wiki40bb, which is neither .* .did you mean wiki40b", 1),
        (["train", "--override", "chunksize=8"], "chunksize is not an option of this model .did you mean chunk_size", 1),
        (
            ["train", "--clip", "local", "--parallel", "fsdp"],
            "with --parallel fsdp no process .* --clip global or --parallel ddp",
            1,
        ),
        (["train", "--preset", "linformer-tiny"], "linformer-tiny cannot be a causal model: every landmark mixes", 1),
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
        (["presets", "zebra"], "No preset name contains zebra", 1),
        (["presets", "--context-length", "0"], "--context-length is 0, but must be at least 1", 1),
        (["presets", "--context-length", str(10**12)], "--context-length is 1000000000000, but must be at most", 1),
        (["presets", "reformer", "--verify"], "The paper states the size of none of these presets", 1),
        (["bench", "flash-giant"], "preset is 'flash-giant', which is not a preset", 1),
        (["bench", "--dtypes", "fp8"], "--dtypes", 2),
        (["bench", "--peers", "nobody"], "--peers", 2),
        (["bench", "--tokens-per-batch", "0"], "--tokens-per-batch is 0, but must be at least 1", 1),
        (["bench", "--out", ""], "--out is empty: give a path", 1),
        (["train", "--override", "chunk=3"], "--override does not fit the model: chunk is not an option", 1),
        (
            ["train", "--data", "/does/not/exist"],
            "--data is /does/not/exist, which is neither a file or folder",
            1,
        ),
        (["eval", "/does/not/exist"], "/does/not/exist does not exist: give the folder of a run", 1),
        (["eval", "{run}", "--stride", "99"], "--stride is 99, but must be from 1 to --context-length 24", 1),
        (["eval", "{run}", "--batch-size", "0"], "--batch-size is 0", 1),
        (["eval", "{run}", "--stride", "0"], "--stride is 0", 1),
        (
            ["eval", "{run}", "--context", "carried", "--stride", "3"],
            "--stride is for windows, but carried",
            1,
        ),
        (["generate", "{run}", "--temperature", "-1"], "--temperature is -1.0, but must be at least 0", 1),
        (["generate", "{run}", "--top-p", "2"], "--top-p is 2.0", 1),
        (["generate", "{run}", "--prompt", "\udcff"], "--prompt is not UTF-8 text", 1),
        (["generate", "{run}", "--seed", "-5"], "--seed is -5, but must be at least 0", 1),
        (["generate", "{run}", "--max-tokens", "0"], "--max-tokens is 0", 1),
        (
            ["train", "--out", "{run}", "--data", "{text}"],
            "already holds a run: resume it with --resume, or give another --out",
            1,
        ),
        (["train", "--out", "{run}", "--resume", "--steps", "9"], "--steps is 9, but the run was started with 4", 1),
        (["train", "--out", "{run}/nothing", "--resume"], "does not exist: give the folder of a run", 1),
        (["train", "--out", "{text}"], "--out is .*text.txt, which is a file: give a folder", 1),
    ],
)
def test_wrong_input_is_answered_with_the_option_and_what_it_allows(
    arguments: list[str], message: str, status: int, folder: Path, fails: Fails
) -> None:
    places = {"run": str(folder / "run"), "text": str(folder / "text.txt")}
    fails([argument.format(**places) for argument in arguments], message, status)


def test_an_interrupt_while_everything_is_still_being_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, lineartime.__main__; print('torch' in sys.modules)"  # the handler is there before what takes long
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("lineartime.cli.main", interrupted)
    assert run_command() == 130


STARTING = """
import os, signal, sys, time
from lineartime import __main__
def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1)
import lineartime.cli
{action}
signal.signal(signal.SIGINT, signal.default_int_handler)
lineartime.cli.main = main
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(
    "action",
    [
        "main = interrupted",
        # What is being imported may turn an interrupt into an error of its own.
        "def main():\n    try:\n        interrupted()\n    except KeyboardInterrupt:\n        raise ImportError('half')",
    ],
)
def test_an_interrupt_says_that_the_command_stopped_and_nothing_else(action: str) -> None:
    script = STARTING.format(action=action)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "stopped\n")


def test_an_error_of_the_program_is_no_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("a mistake in the program")

    monkeypatch.setattr("lineartime.cli.main", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        run_command()


def test_arguments_of_the_library_are_shown_as_flags_and_positional_ones_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    from lineartime.cli import bench

    def wrong(argument: str) -> str:
        def run(options: object) -> None:
            raise ArgumentError(argument, "is wrong.")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench, "run", run)
            assert main(["bench"]) == 1
        return capsys.readouterr().err

    assert wrong("tokens_per_batch") == "error: --tokens-per-batch is wrong.\n"
    assert wrong("presets") == "error: presets is wrong.\n"  # it has no flag
    assert wrong("segment") == "error: segment is wrong.\n"  # an argument of the library, not of the command


def test_what_is_called_otherwise_in_python_is_shown_as_it_is_written_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lineartime.cli import bench

    error = LineartimeError(
        Argument("memory", False), ", ", Argument("rounds", 3), ", ", Argument("resume", True), ", ", Call("info")
    )
    assert str(error) == "memory=False, rounds=3, resume=True, info()"

    def run(options: object) -> None:
        raise error

    monkeypatch.setattr(bench, "run", run)
    assert main(["bench"]) == 1
    # The benchmark cannot be resumed: the flag is that of `train`, of which errors give advice.
    assert capsys.readouterr().err == "error: --no-memory, --rounds 3, --resume, `lineartime info`\n"


def test_the_help_lists_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--version" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"lineartime \d+\.\d+\.\d+\S*, torch \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_too_little_memory_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    import torch

    from lineartime.cli import info, train

    errors = [MemoryError(), torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: out of memory")]
    for error in errors:

        def run(options: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(info, "run", run)
        fails(["info"], "This machine has too little memory.")
        with monkeypatch.context() as patch:
            patch.setattr(train, "run", lambda options, arguments: run(options))
            fails(["train"], "too little memory: use a smaller --batch-size or --context-length.")

    def broken(options: object) -> None:
        raise RuntimeError("a mistake in the program")

    monkeypatch.setattr(info, "run", broken)
    with pytest.raises(RuntimeError, match="a mistake"):
        main(["info"])


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    script = f"{sys.executable} -m lineartime info --json | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["runs", "{run}"], *([name, "--help"] for name in COMMANDS)])
def test_what_computes_nothing_appears_without_the_seconds_that_pytorch_takes(arguments: list[str], folder: Path) -> None:
    arguments = [argument.format(run=folder / "run") for argument in arguments]
    script = f"""
import sys
import warnings
from lineartime.cli import main
try:
    status = main({arguments})
except SystemExit as error:
    status = error.code
print(status, *sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    status, *modules = result.stderr.splitlines()[-1].split()
    assert (status in ("0", "None"), bool(result.stdout)) == (True, True)
    assert not {"torch", "tensorboardX", "safetensors"} & set(modules)
    assert "runs" in arguments or "matplotlib" not in modules


def test_a_warning_is_one_line_without_code() -> None:
    script = """
import sys, warnings
sys.argv = ["lineartime", "--version"]
from lineartime.__main__ import main
main()
warnings.warn("the compiler fails", RuntimeWarning)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr == "warning: the compiler fails\n"


def test_a_tokenizer_is_not_trained_for_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("abc\n" * 1000)
    monkeypatch.setattr("lineartime.data.train_tokenizer", None)
    out = tmp_path / "text.txt" / "tokenizer.json"
    assert main(["tokenize", "--data", str(tmp_path / "text.txt"), "--out", str(out)]) == 1
    assert f"Cannot write {out}" in " ".join(capsys.readouterr().err.split())
    assert [file.name for file in tmp_path.iterdir()] == ["text.txt"]
