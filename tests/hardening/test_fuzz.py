"""A fuzzer over the formats of files: each is read, or refused in one sentence.

`FUZZ=20000 pytest tests/hardening/test_fuzz.py` tries so many of each by hand.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hardening.test_files import FILES

from lineartime.errors import LineartimeError
from lineartime.files import read_file
from lineartime.models.config import ModelConfig
from lineartime.models.memory import check_memory
from lineartime.models.presets import resolve
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
