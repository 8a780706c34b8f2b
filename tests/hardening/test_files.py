"""The decoder of files: what it reads, and a table of wrong values, each of which ends in one sentence."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lineartime
from lineartime.checkpoint import best_checkpoint
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.fields import Between, check_fields, decode
from lineartime.files import DamagedFileError, read_file
from lineartime.runs.record import read_record
from lineartime.training.setup import saved_config


@dataclass(frozen=True)
class Part:
    size: Annotated[int, Between(1, 9)]
    rate: Annotated[float, Between(above=0)] | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    named: dict[str, Part] | None = None
    place: Path | None = None
    text: str = ""
    on: bool = False
    kind: Literal["a", "b"] = "a"
    either: str | tuple[str, ...] = ""
    anything: Any = None


@dataclass(frozen=True)
class Checked:
    places: tuple[Path, ...] = ()
    size: Annotated[int, Between(1)] = 1

    def __post_init__(self) -> None:
        check_fields(self)


NAN, HUGE = math.nan, 10**30
EXAMPLE = {"parts": [{"size": 1, "rate": 2}], "named": {"x": {"size": 9}}, "place": "a/b", "anything": [1, {"b": "c"}]}
WRONG: dict[str, list[Any]] = {
    "parts": ["x", {}, 3, True, None, [3]],
    "parts.0.size": ["3", [3], {"a": 3}, 1.5, True, None, NAN, HUGE, 0, 10],
    "parts.0.rate": ["3", [3.0], {"a": 3}, True, NAN, math.inf, -math.inf, 0, -1.0],
    "parts.0.sise": [3],
    "named": [3, [1], "x", True],
    "named.x": [None, 3, [1], "x", {}, {"unknown": 1}],
    "named.x.size": ["1"],
    "place": [3, ["x"], {"a": "x"}, True, ""],
    "text": [3, ["x"], {"a": "x"}, True, None, NAN],
    "on": ["true", 1, [True], None],
    "kind": ["c", 3, ["a"], True, None],
    "either": [3, {"a": 1}, True, None, [[[]]], NAN],
    "anything": [NAN],
}


def test_plain_data_becomes_dataclasses_tuples_and_paths() -> None:
    expected = Whole((Part(1, 2),), {"x": Part(9)}, Path("a/b"), anything=[1, {"b": "c"}])
    assert decode(Whole, EXAMPLE) == expected
    assert decode(Whole, expected) is expected
    places: Any = ["a", Path("b")]
    assert Checked(places) == Checked((Path("a"), Path("b")))
    with pytest.raises(ArgumentError, match=r"^size is 0, but must be at least 1"):
        Checked(size=0)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_wrong_value_is_named_with_its_file_and_field(field: str, value: Any, tmp_path: Path) -> None:
    copy = inner = json.loads(json.dumps(EXAMPLE))
    *keys, last = [int(key) if key == "0" else key for key in field.split(".")]
    for key in keys:
        inner = inner[key]
    inner[last] = value
    (tmp_path / "file.json").write_text(json.dumps(copy))
    with pytest.raises(DamagedFileError) as caught:
        read_file(tmp_path / "file.json", Whole)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/file.json is damaged ({field.replace('.0', '[0]')}")
    assert message.endswith("): restore it from a copy.")
    assert "\n" not in message
    assert any(what in message for what in (repr(value), "finite number", "is missing", "not a field", "is empty", "[0]", ".b"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}", "parts is missing"),
        (b'{"parts": [{"sise": 1}]}', "parts[0].sise is not a field here (did you mean size?): there are size, rate"),
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"parts": 3', "Expecting ',' delimiter: line 1 column 12"),
        (b"[]", "it is [], but must be an object"),
        (b'{"a": "\xff"}', "can't decode byte 0xff in position 7"),
        (b'{"parts": ' + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
    ],
)
def test_content_that_is_no_such_object_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(DamagedFileError) as caught:
        read_file(tmp_path / "file.json", Whole)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 900


def test_range_holds_for_a_union_and_any_value_can_be_shown() -> None:
    with pytest.raises(ArgumentError, match="n is 99, but must be at least 1 and at most 5"):
        decode(Annotated[int | None, Between(1, 5)], 99, "n")
    with pytest.raises(ArgumentError, match="n is a int that is too long to be shown, but must be a text"):
        decode(str, 10**5000, "n")


FILES: dict[str, tuple[str, Any, Callable[[Path], Any]]] = {
    "step-00000006/model.json": ("d_model", "16", lineartime.load),
    "step-00000006/training.json": ("skipped", -1, lambda run: saved_config(run / "step-00000006")),
    "step-00000006/validation.json": ("validation_loss", "2.0", best_checkpoint),
    "run.json": ("seed", [3], read_record),
}


@pytest.mark.parametrize("name", FILES)
def test_file_of_the_library_is_read_by_the_decoder(name: str, finished: Path) -> None:
    field, value, read = FILES[name]
    plain = json.loads((finished / name).read_text()) if (finished / name).exists() else {}
    (finished / name).write_text(json.dumps({**plain, field: value}))
    with pytest.raises(LineartimeError, match=rf"{name.rpartition('/')[2]}.*{field} is ") as caught:
        read(finished)
    assert "\n" not in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8) | st.just("\0")
PLAIN = st.recursive(SCALARS, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3))
FIELDS = st.fixed_dictionaries({"size": st.integers(0, 9) | PLAIN}, optional={"rate": st.floats(0, 1) | PLAIN})


@pytest.mark.nightly
@settings(max_examples=int(os.environ.get("FUZZ", "300")), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({"parts": st.lists(FIELDS) | PLAIN}, optional=dict.fromkeys(["named", "text", "either"], PLAIN)))
def test_any_content_is_read_or_refused_in_one_sentence(tmp_path: Path, plain: Any) -> None:
    (tmp_path / "file.json").write_text(json.dumps(plain))
    try:
        assert isinstance(read_file(tmp_path / "file.json", Whole), Whole)
    except DamagedFileError as error:
        message = str(error)
        assert len(message.splitlines()) == 1
        assert len(message.encode()) < 3000
