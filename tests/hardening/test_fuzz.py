"""A fuzzer over the formats of files and the command line: whatever they hold, all ends in a value or in one sentence.

`FUZZ=20000 pytest tests/hardening/test_fuzz.py` tries so many of each by hand, and a fifth of command lines, which take longer.
"""

import dataclasses
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hardening.test_files import FILES

import lineartime
from lineartime.cli import main, options_of
from lineartime.errors import LineartimeError
from lineartime.files import read_file
from lineartime.models.config import ModelConfig
from lineartime.models.memory import check_memory
from lineartime.models.presets import resolve
from lineartime.runs.metrics import read_damaged_metrics
from lineartime.runs.record import Record
from lineartime.training.config import TrainConfig

pytestmark = pytest.mark.nightly  # test_files.py has each kind of wrong value every day
BUDGET = int(os.environ.get("FUZZ", "150"))
FUZZED = settings(
    max_examples=BUDGET,
    deadline=None,
    derandomize="FUZZ" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["flash", "clm", "0" * 64, "\0", "../x", "auto", "nan", "1e999"]),
)
PLAIN = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
EXAMPLES = {name: (file.content, file.example) for name, file in FILES.items() if not file.part and name != "model.json"}


def like(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type, many of which can be read in its place."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(0, 300)
    if isinstance(value, float):
        return st.floats(0, 1)
    return st.just(value) if isinstance(value, str) else PLAIN


@st.composite
def changes(draw: st.DrawFn, example: dict[str, Any]) -> dict[str, Any]:
    """Plain data like an example, with at most a few other fields and values at any depth."""
    copy: dict[str, Any] = json.loads(json.dumps(example))
    for _ in range(draw(st.integers(0, 3))):
        inner: Any = copy
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = draw(st.sampled_from(keys)) if keys else "x"
            if keys and isinstance(inner[key], (dict, list)) and draw(st.booleans()):
                inner = inner[key]
                continue
            break
        if isinstance(inner, dict) and draw(st.booleans()):
            key = draw(st.text(max_size=5)) if draw(st.booleans()) else key
        if isinstance(inner, dict) or keys:
            own = inner[key] if isinstance(inner, list) else inner.get(key)
            inner[key] = draw(like(own) if draw(st.booleans()) else PLAIN)
    return copy


class Counted:
    """How many examples were read, and how many were refused. If one is 0, the examples try only half of the code."""

    def __init__(self) -> None:
        self.read = self.refused = 0

    @contextmanager
    def example(self) -> Iterator[None]:
        """Reads an example, or refuses it in a sentence."""
        try:
            yield
        except LineartimeError as error:
            check_sentence(error)
            self.refused += 1
        else:
            self.read += 1

    def check(self, least: int) -> None:
        """Of the usual number of examples, require so many of each."""
        print(f"{self.read} were read, {self.refused} were refused")
        assert min(self.read, self.refused) >= least * BUDGET // 150


def check_sentence(error: LineartimeError) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 3000
    message.encode()  # it can be printed


def read_model(plain: dict[str, Any], folder: Path) -> None:
    config = ModelConfig.from_dict(plain)
    check_memory(config)
    assert ModelConfig.from_dict(config.to_dict()) == config


def read_options(plain: dict[str, Any], folder: Path) -> None:
    config = TrainConfig.from_dict(plain)
    assert TrainConfig.from_dict(config.to_dict()) == config


def read_json(content: Any) -> Callable[[dict[str, Any], Path], None]:
    def read(plain: dict[str, Any], folder: Path) -> None:
        (folder / "file.json").write_text(json.dumps(plain))
        assert isinstance(read_file(folder / "file.json", content), content)

    return read


READERS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any], Path], None]]] = {
    **{name: (example, read_json(content)) for name, (content, example) in EXAMPLES.items()},
    "a model": (resolve("flash-tiny").to_dict(), read_model),
    "options": (TrainConfig().to_dict(), read_options),
}


@pytest.mark.parametrize("name", READERS)
def test_changed_files_are_read_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    (example, read), counted = READERS[name], Counted()

    @FUZZED
    @given(changes(example))
    def check(plain: dict[str, Any]) -> None:
        with counted.example():
            read(plain, tmp_path)

    check()
    counted.check(least=2)


def test_any_bytes_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    file, counted = tmp_path / "run.json", Counted()

    @FUZZED
    @given(st.binary(max_size=200) | (PLAIN | changes(EXAMPLES["run.json"][1])).map(lambda plain: json.dumps(plain).encode()))
    def check(content: bytes) -> None:
        file.write_bytes(content)
        with counted.example():
            read_file(file, Record)
        (tmp_path / "metrics.jsonl").write_bytes(content)
        lines, problems = read_damaged_metrics(tmp_path)
        assert len(lines) + len(problems) <= content.count(b"\n") + 1

    check()
    counted.check(least=1)


COMMANDS: dict[str, list[str]] = {
    "train": ["--out", "{}/new", "--data", "{}/text.txt", "--cache", "{}/cache", "--steps", "1"],
    "eval": ["{}/run", "--cache", "{}/cache", "--max-tokens", "9"],
    "generate": ["{}/run", "--max-tokens", "3"],
    "fill": ["{}/run", "--text", "a [MASK]"],
    "inspect": ["{}/run", "--text", "a", "--out", "{}/inspection"],
    "convert": ["{}/run", "{}/run"],
    "export": ["{}/run", "{}/nothing/step.pt2"],
    "runs": ["{}"],
    "tokenize": ["--data", "{}/text.txt", "--out", "{}/tokenizer.json", "--vocab-size", "300"],
    "presets": ["flash-tiny"],
    "info": [],
}
PLACES = ["", "{}", "{}/run", "{}/text.txt", "{}/run/run.json", "/dev/null", "..", "日本", "\udcff"]
NUMBERS = ["0", "1", "7", "-1", "0.5", "1e999", "nan", "-inf", "9" * 30]
WORDS = ["x", "best", "on", "flash-tiny", "bytes", "mlm", "=", "d_model=0", "d_model=x", "chunk_size=9e9"]
VALUES = st.sampled_from([*PLACES, *NUMBERS, *WORDS])
SMALL = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context-length", "16", "--eval-windows", "1"]


def flags_of(command: str) -> list[str]:
    fields = dataclasses.fields(options_of(command))
    return [f"--{field.name.replace('_', '-')}" for field in fields if field.name != "compile"]


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command as it works, with at most a few other options, values and words."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    arguments = [*COMMANDS[command], *(SMALL if command == "train" else [])]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, max(0, len(arguments) - 1)))
        if arguments and draw(st.booleans()):
            arguments[place : place + 1] = [draw(VALUES)] if draw(st.booleans()) else []
        else:
            arguments += [draw(st.sampled_from(flags_of(command) or ["--help"])), *draw(st.lists(VALUES, max_size=2))]
    return [command, *arguments]


def test_any_command_line_works_or_is_refused_in_a_sentence(
    config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, statuses = config().run_directory.parent, Counter[int]()
    lineartime.train(config(steps=1))
    monkeypatch.chdir(folder)

    @settings(FUZZED, max_examples=-(-BUDGET // 5))
    @given(command_lines())
    def check(arguments: list[str]) -> None:
        shutil.rmtree(folder / "new", ignore_errors=True)
        capsys.readouterr()
        began = time.monotonic()
        try:
            status = main([argument.replace("{}", str(folder)) for argument in arguments])
        except SystemExit as ended:  # of tyro, for help and words that are no options
            status = int(ended.code or 0)
        assert status in (0, 1, 2)
        shown = capsys.readouterr().err
        assert "Traceback" not in shown
        assert status == 2 or (status == 1) == ("error: " in shown)  # the parser's own errors are boxes
        assert time.monotonic() - began < 60  # most of them take less than a tenth
        statuses[status] += 1

    check()
    print(statuses)
    assert 0 < statuses[0] < statuses.total()  # some work, and some are refused
