"""A fuzzer over the formats of files: whatever they hold, reading them ends in a value or in one sentence.

`FUZZ=20000 pytest tests/hardening/test_fuzz.py` tries so many of each, by hand.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineartime.checkpoint.contents import TrainingState
from lineartime.data.encode import Facts
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.experiments.folder import PlanOptions
from lineartime.experiments.outcome import Outcome
from lineartime.fields import decode
from lineartime.json_files import read_file
from lineartime.models.config import ModelConfig
from lineartime.models.presets import resolve
from lineartime.models.size import check_memory
from lineartime.runs.metrics import read_damaged_metrics
from lineartime.runs.record import Record
from lineartime.training.config import TrainConfig

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
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "training": (TrainingState, {"step": 3, "text": "x", "data": {"rows": 3}, "config": TrainConfig().to_dict()}),
    "record": (Record, {"options": {"data": "x"}, "processes": [{"machine": {"gpus": ["x"]}, "git": {"commit": "x"}}]}),
    "facts": (Facts, {"dtype": "uint16", "n_tokens": 1, "n_bytes": 1, "n_words": 1, "sha256": {"tokens-00000.bin": "0" * 64}}),
    "outcome": (Outcome, {"kind": "run", "tests": [], "machine": {"cpu": "x"}}),
    "plan": (PlanOptions, {"data": [], "code": [], "books": [], "wikipedia": [], "budget": 1.0, "tuning": None}),
}


@st.composite
def changes(draw: st.DrawFn, example: dict[str, Any]) -> dict[str, Any]:
    """Plain data like an example, with a few other fields and values at any depth."""
    copy: dict[str, Any] = json.loads(json.dumps(example))
    for _ in range(draw(st.integers(1, 3))):
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
            inner[key] = draw(PLAIN)
    return copy


def check_sentence(error: LineartimeError) -> None:
    message = str(error)
    assert len(message.splitlines()) == 1
    assert len(message) < 3000
    message.encode()  # it can be printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_changed_files_are_read_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    content, example = EXAMPLES[name]
    file = tmp_path / "file.json"

    @FUZZED
    @given(changes(example))
    def check(plain: dict[str, Any]) -> None:
        file.write_text(json.dumps(plain))
        try:
            found = read_file(file, content)
        except LineartimeError as error:
            check_sentence(error)
        else:
            assert isinstance(found, content)

    check()


def test_any_bytes_are_read_or_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "run.json"

    @FUZZED
    @given(st.binary(max_size=200) | PLAIN.map(lambda plain: json.dumps(plain).encode()))
    def check(content: bytes) -> None:
        file.write_bytes(content)
        try:
            read_file(file, Record)
        except LineartimeError as error:
            check_sentence(error)
        (tmp_path / "metrics.jsonl").write_bytes(content)
        lines, problems = read_damaged_metrics(tmp_path)
        assert len(lines) + len(problems) <= content.count(b"\n") + 1

    check()


@FUZZED
@given(changes(resolve("flash-tiny").to_dict()))
def test_any_description_of_a_model_is_a_model_or_refused(plain: dict[str, Any]) -> None:
    try:
        config = ModelConfig.from_dict(plain)
        check_memory(config)
    except ArgumentError as error:
        check_sentence(error)
    else:
        assert ModelConfig.from_dict(config.to_dict()) == config


@FUZZED
@given(changes(TrainConfig().to_dict()))
def test_any_options_of_a_run_are_options_or_refused(plain: dict[str, Any]) -> None:
    try:
        config = TrainConfig.from_dict(plain)
    except ArgumentError as error:
        check_sentence(error)
    else:
        assert TrainConfig.from_dict(config.to_dict()) == config


@FUZZED
@given(st.sampled_from([TrainingState, Record, Facts, Outcome, PlanOptions]), PLAIN)
def test_any_plain_data_is_decoded_or_refused(content: Any, plain: Any) -> None:
    try:
        found = decode(content, plain)
    except ArgumentError as error:
        check_sentence(error)
    else:
        assert isinstance(found, content)
