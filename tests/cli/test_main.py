"""The command line as its users meet it: help, exit statuses, and never a traceback."""

import dataclasses
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lineartime.__main__ import main as run_command
from lineartime.cli import COMMANDS, main, options_of
from lineartime.errors import ArgumentError, LineartimeError

from .conftest import Fails


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """What `main` changes for its process is changed back."""
    handler, format_warning = signal.getsignal(signal.SIGINT), warnings.formatwarning
    yield
    signal.signal(signal.SIGINT, handler)
    warnings.formatwarning = format_warning


def test_every_option_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    for command, does in COMMANDS.items():
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        text = re.sub(r"[\s│╭╮╰╯─]+", " ", capsys.readouterr().out)
        assert does in text
        helped = re.findall(r"[\w)][.] \((?:default: |required|repeatable)|dropout=0.1 \(default", text)
        fields = dataclasses.fields(options_of(command))
        groups = [dataclasses.fields(made) for field in fields if dataclasses.is_dataclass(made := field.default_factory)]
        assert len(helped) == len(fields) + sum(len(group) - 1 for group in groups) + 1, command  # --import


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["train", "--steps", "many"],
        ["train", "--stepz", "3"],
        ["train", "a.txt"],
        ["bench", "--dtypes", "fp32", "fp16"],
        ["presets", "--import"],
    ],
)
def test_the_parser_refuses_what_is_no_option_or_value(arguments: list[str], fails: Fails) -> None:
    fails(arguments, arguments[-1] if len(arguments) > 1 else "", status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # A list that is given twice would lose its first values.
        (["bench", "--context_lengths=8", "--context-lengths", "16"], "--context-lengths is given twice"),
        # Types and ranges of options.
        (["bench", "--context-lengths", "8", "0"], "--context-lengths is 0, but must be at least 1"),
        (["train", "--data", ""], "--data is empty: give a path"),
        (["generate", "{run}", "--top-p", "2"], "--top-p is 2.0, but must be above 0 and at most 1"),
        (["presets", "--context-length", str(10**12)], "--context-length is 1000000000000, but must be at least 1 and at most"),
        # Options that do not fit together, which a message writes as options, too.
        (["train", "--warmup-steps", "600"], "--warmup-steps is 600, but must be below `steps=600`"),
        (["train", "--clip", "local", "--parallel", "fsdp"], "with `parallel=fsdp` .* `clip=global` or `parallel=ddp`"),
        (["train", "--out", "{run}", "--data", "{text}"], "holds a run: resume it with `resume=True`, or give another `out`"),
        # Names, with the similar ones.
        (["train", "--preset", "flash-tyni"], "--preset is 'flash-tyni', .*mean flash-tiny.* that `lineartime presets` lists"),
        (["bench", "flash-giant"], "preset is 'flash-giant', which is not a preset"),
        (["presets", "zebra"], "No preset name contains zebra"),
        # Experiments, and their options.
        (["reproduce", "positons"], r"name has 'positons', which is not an experiment here \(did you mean positions\?\)"),
        (["reproduce", "lm", "--rates", "0.001"], "--rates is 0.001, but each optimiser has its own: give one in `optimizers`"),
        (["reproduce", "memory", "--tuning", "3"], "--tuning is 3.0, which memory does not have: leave it out"),
        (["reproduce", "lm", "--systems", "flash-quat"], r"--systems has 'flash-quat'.*\(did you mean flash-quad"),
        (["reproduce", "lm", "--books", "/none"], "--books is /none, which is neither a file or folder"),
        (["reproduce"], "name is missing: give an experiment, lm, next-ablation"),
        (["reproduce", "lm", "--report"], "has no runs of lm at the scale cpu: run it first"),
        # Files and folders.
        (["eval", "/does/not/exist"], "/does/not/exist does not exist: give the folder of a run"),
        (["train", "--data", "x.txt", "--out", ""], "--out is an empty path: give one, or leave it out"),
        (["train", "--out", "{text}"], "--out is .*text.txt, which is a file: give a folder"),
        (
            ["train", "--preset", "transformer-tiny", "--context-length", "2000"],
            "--context-length is 2000, but transformer-tiny reads at most 1024 tokens: .* `override` max_positions=2000",
        ),
    ],
)
def test_wrong_input_is_answered_with_the_option_and_what_it_allows(
    arguments: list[str], message: str, folder: Path, fails: Fails
) -> None:
    places = {"run": str(folder / "run"), "text": str(folder / "text.txt")}
    fails([argument.format(**places) for argument in arguments], message)


def test_an_interrupt_says_that_the_command_stopped_and_nothing_else() -> None:
    script = """
import os, signal, sys, time
import lineartime.cli, lineartime.__main__
def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    except KeyboardInterrupt:  # what is being imported may turn an interrupt into an error of its own
        raise ImportError("half")
signal.signal(signal.SIGINT, signal.default_int_handler)
lineartime.cli.main = main
sys.exit(lineartime.__main__.main())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "stopped\n")


def test_an_error_of_the_program_is_neither_interrupt_nor_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: object) -> None:
        raise RuntimeError("a mistake in the program")

    monkeypatch.setattr("lineartime.cli.info.run", broken)
    monkeypatch.setattr(sys, "argv", ["lineartime", "info"])
    with pytest.raises(RuntimeError, match="a mistake"):
        run_command()


def test_an_argument_that_is_wrong_is_written_as_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lineartime.cli import bench

    def shown(error: LineartimeError) -> str:
        def run(options: object) -> None:
            raise error

        monkeypatch.setattr(bench, "run", run)
        assert main(["bench"]) == 1
        return capsys.readouterr().err

    assert shown(ArgumentError("tokens_per_batch", "is wrong.")) == "error: --tokens-per-batch is wrong.\n"
    assert shown(ArgumentError("presets", "is wrong.")) == "error: presets is wrong.\n"  # it has no flag
    assert shown(ArgumentError("segment", "is wrong.")) == "error: segment is wrong.\n"  # an argument of the library alone
    assert shown(LineartimeError("`steps=3` is wrong.")) == "error: `steps=3` is wrong.\n"  # as grep finds it in the source


def test_the_help_lists_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--version" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"lineartime \d+\.\d+\.\d+\S*, torch \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_too_little_memory_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch, fails: Fails) -> None:
    import torch

    from lineartime.cli import info, train

    for error in (MemoryError(), torch.OutOfMemoryError("no room")):

        def run(options: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(info, "run", run)
        fails(["info"], "This machine has too little memory.")
        with monkeypatch.context() as patch:
            patch.setattr(train, "run", lambda options, arguments: run(options))
            fails(["train"], "too little memory: use a smaller --batch-size or --context-length.")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    script = f"{sys.executable} -m lineartime info --json | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_what_computes_nothing_appears_without_the_seconds_that_pytorch_takes(folder: Path) -> None:
    script = f"""
import sys
from lineartime.cli import main
for arguments in (["--version"], ["--help"], ["train", "--help"], ["runs", {str(folder / "run")!r}]):
    try:
        assert main(arguments) == 0
    except SystemExit as error:
        assert error.code == 0
    if arguments == ["--help"]:  # which imports no command
        assert not [name for name in sys.modules if name.startswith("lineartime.cli.")]
    assert arguments[0] == "runs" or "matplotlib" not in sys.modules
    assert not {{"torch", "tensorboardX", "safetensors"}} & sys.modules.keys(), arguments
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
