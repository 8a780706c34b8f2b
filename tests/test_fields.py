"""Plain data as dataclasses, and values that do not fit their types."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from lineartime.errors import ArgumentError
from lineartime.fields import Between, check_fields, decode


@dataclass(frozen=True)
class Part:
    size: Annotated[int, Between(1, 9)]
    rate: Annotated[float, Between(above=0)] | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    named: dict[str, Part] | None = None
    place: Path | None = None
    kind: Literal["a", "b"] = "a"
    anything: Any = None


@dataclass(frozen=True)
class Checked:
    places: tuple[Path, ...] = ()
    size: Annotated[int, Between(1)] = 1

    def __post_init__(self) -> None:
        check_fields(self)


def test_plain_data_becomes_dataclasses_tuples_and_paths() -> None:
    plain = {"parts": [{"size": 1, "rate": 2}], "named": {"x": {"size": 9}}, "place": "a/b", "anything": [1, {"b": "c"}]}
    expected = Whole((Part(1, 2),), {"x": Part(9)}, Path("a/b"), anything=[1, {"b": "c"}])
    assert decode(Whole, plain) == expected
    assert decode(Whole, expected) is expected


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ([], "^the content is \\[\\], but must be an object with the fields parts, named, place, kind, anything"),
        ({}, "^parts is missing"),
        ({"parts": [{"size": 1}, {"size": 10}]}, "^parts\\[1\\].size is 10, but must be at least 1 and at most 9"),
        ({"parts": [{"size": True}]}, "^parts\\[0\\].size is True, but must be an integer"),
        ({"parts": [{"size": 1, "rate": float("nan")}]}, "^parts\\[0\\].rate is nan, but must be a finite number"),
        ({"parts": [{"sise": 1}]}, "^parts\\[0\\].sise is not a field here .did you mean size.+: there are size, rate"),
        ({"parts": {}}, "^parts is {}, but must be a list, each item of which is an object with the fields size, rate"),
        ({"parts": [], "named": {"x": {"size": "1"}}}, "^named.x.size is '1', but must be an integer"),
        ({"parts": [], "place": ""}, "^place is empty: give a path"),
        ({"parts": [], "place": "a\0b"}, "^place is 'a.x00b', but must be a text that UTF-8 can hold"),
        ({"parts": [], "kind": "c"}, "^kind is 'c', but must be one of 'a', 'b'"),
        ({"parts": [], "anything": {"b": [2**70]}}, "^anything.b\\[0\\] is 1180591620717411303424, but must be at least"),
    ],
)
def test_field_the_value_and_what_is_allowed_are_named(plain: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        decode(Whole, plain)


def test_dataclass_that_checks_itself_takes_lists_and_texts() -> None:
    places: Any = ["a", Path("b")]
    assert Checked(places) == Checked((Path("a"), Path("b")))
    with pytest.raises(ArgumentError, match=r"^size is 0, but must be at least 1"):
        Checked(size=0)


def test_range_holds_for_a_union_and_any_value_can_be_shown() -> None:
    for hint, value, message in (
        (Annotated[int | None, Between(1, 5)], 99, "n is 99, but must be at least 1 and at most 5"),
        (int, 10**5000, "n is a int that is too long to be shown, but must be"),
        (str, 10**5000, "n is a int that is too long to be shown, but must be a text"),
    ):
        with pytest.raises(ArgumentError, match=message):
            decode(hint, value, "n")
