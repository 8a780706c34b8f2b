"""`lineartime generate`."""

import io
import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from lineartime import Sampling, generate_text, load, native
from lineartime.cli import main
from lineartime.data import ByteTokenizer
from lineartime.layers import dense
from lineartime.layers.dense import Dense
from lineartime.models import decoder
from lineartime.native import native_functions

from .conftest import COMMAND, Fails, Fork, Prints


@pytest.fixture
def generated(folder: Path, prints: Prints) -> Prints:
    """`generated("--prompt", "the ")`: what the run continues."""
    return lambda *arguments: prints("generate", folder / "run", *arguments)


def test_several_samples_are_printed_with_headers_or_as_a_line_of_json_each(generated: Prints) -> None:
    drawing = ("--prompt", "the ", "--max-tokens", 9, "--seed", 1)
    shown = generated(*drawing, "--samples", 3)
    assert [line for line in shown.splitlines() if line.startswith("--- ")] == [f"--- sample {n} of 3 ---" for n in (1, 2, 3)]
    samples = [json.loads(line) for line in generated(*drawing, "--samples", 3, "--json").splitlines()]
    assert [sample["sample"] for sample in samples] == [1, 2, 3]
    assert shown == "".join(f"--- sample {n} of 3 ---\nthe {sample['text']}\n" for n, sample in enumerate(samples, 1))
    assert all(sample["prompt"] == "the " and sample["tokens"] <= 9 for sample in samples)
    streamed = generated(*drawing)
    assert streamed == "the " + json.loads(generated(*drawing, "--json"))["text"] + "\n"
    assert generated(*drawing[:-1], 2) not in (streamed, "the \n")  # another seed


def test_the_prompt_may_come_from_a_file_or_from_standard_input(
    folder: Path, tmp_path: Path, generated: Prints, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    options, text = ("--max-tokens", "5", "--temperature", "0", "--json"), "the square\r\nof é\n"
    expected = generated(*options, "--prompt", text)
    (tmp_path / "prompt.txt").write_bytes(text.encode("utf-8-sig"))  # the byte order mark is not text
    assert generated(*options, "--prompt-file", "prompt.txt") == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8-sig"))))
    assert generated(*options, "--prompt-file", "-") == expected
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    command = ["generate", str(folder / "run"), *options]
    fails([*command, "--prompt-file", "latin.txt"], "--prompt-file is latin.txt, which is not UTF-8 text")
    fails([*command, "--prompt-file", "-", "--prompt", "a"], "--prompt-file cannot be combined with `prompt`")


def test_precision_and_threads_are_those_asked_for(generated: Prints, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen, multiply = torch.get_num_threads(), [], Dense.forward

    def forward(self: Dense, x: torch.Tensor) -> torch.Tensor:
        out = multiply(self, x)
        seen.append((out.dtype, torch.get_num_threads()))
        return out

    monkeypatch.setattr(Dense, "forward", forward)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        generated("--max-tokens", 3, "--precision", precision, "--threads", before + 1)
        assert {seen.pop() for _ in seen[:]} == {(dtype, before + 1)}
    assert torch.get_num_threads() == before


def test_int8_weights_read_the_prompt_and_decode(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(weight.clone())
        return dense.quantized(weight)

    monkeypatch.setattr(decoder, "quantized", quantized)
    arguments = ["generate", str(folder / "run"), "--prompt", "the ", "--max-tokens", "20", "--temperature", "0"]
    assert main([*arguments, "--weights", "int8"]) == 0
    shown = capsys.readouterr()
    assert "cpu, fp32 with int8 weights" in shown.err
    embeddings = [weight for weight in made if weight.shape[0] == 258]
    assert len(embeddings) == 2  # to see whether it can, and of the rounded model
    assert not torch.equal(*embeddings)
    model = load(folder / "run").eval()
    model.quantize()
    assert shown.out == "the " + "".join(generate_text(model, ByteTokenizer(), "the ", 20, Sampling(temperature=0.0))) + "\n"


def test_missing_compiler_is_told_once(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    monkeypatch.setattr(native, "cpp_compiler", lambda: None)
    arguments = ["generate", str(folder / "run"), "--prompt", "the ", "--max-tokens", "2"]
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("slower than C++, because there is no GNU C++ compiler here") == 1
    native_functions.cache_clear()
    fails([*arguments, "--weights", "int8"], "--weights is int8, .* but there is no GNU C\\+\\+ compiler here: use 'own'")
    native_functions.cache_clear()
    monkeypatch.setenv("LINEARTIME_NATIVE", "0")  # by which the user says it
    assert main(arguments) == 0
    assert "C++" not in capsys.readouterr().err
    native_functions.cache_clear()  # or later tests would find no functions


def test_a_stop_text_ends_the_text_and_is_not_shown(folder: Path, generated: Prints, fails: Fails) -> None:
    drawing = ["--prompt", "the ", "--max-tokens", "40", "--seed", "1"]
    whole = generated(*drawing).removeprefix("the ").removesuffix("\n")
    stop = whole[10:12]
    assert generated(*drawing, "--stop", "no such text", stop) == f"the {whole[: whole.index(stop)]}\n"
    fails(["generate", str(folder / "run"), *drawing, "--samples", "0"], "^error: --samples is 0, but must be at least 1")


@pytest.mark.slow
def test_text_appears_as_it_is_produced(folder: Path, fork: Fork) -> None:
    for seed in range(10):  # a text may end its document before it can be interrupted, which is no fault
        process = fork(COMMAND.format(["generate", str(folder / "run"), "--max-tokens", "1000000", "--seed", str(seed)]))
        deadline = time.monotonic() + 120  # long before the millionth token
        while not process.output.partition("fp32\n")[2]:  # the note on how it is computed
            assert time.monotonic() < deadline, process.output
            time.sleep(0.02)
        process.send(signal.SIGINT)
        if (status := process.wait(60)) != 0:
            break
    assert status == 130, process.output
    assert "Traceback" not in process.output


def test_a_saved_state_is_continued_as_the_whole_text_is(
    folder: Path, generated: Prints, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = ("--max-tokens", "20", "--seed", "1")
    whole, square = generated("--prompt", "the square of", *drawing), generated("--prompt", "the square", *drawing)
    assert main(["generate", str(folder / "run"), "--prompt", "the square", "--save-state", "text.state", *drawing]) == 0
    saved = capsys.readouterr()
    assert saved.out == square
    assert re.search(r"text.state: the state after 10 tokens, [\d.]+ kB\n", saved.err)
    assert generated("--state", "text.state", "--prompt", " of", *drawing) == whole.removeprefix("the square")


def test_a_text_can_be_read_without_generating(folder: Path, generated: Prints, fails: Fails) -> None:
    reading = ["--prompt", "the square", "--save-state", "text.state", "--max-tokens", "0"]
    assert generated(*reading) == ""
    fails(["generate", str(folder / "run"), *reading], "--save-state is text.state, which exists already")
    samples = generated("--state", "text.state", "--samples", 2, "--json", "--max-tokens", 5)
    assert [json.loads(line)["sample"] for line in samples.splitlines()] == [1, 2]
