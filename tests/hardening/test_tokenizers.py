"""What a tokenizer from elsewhere can do to the Rust library that runs it: each ends in one sentence."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from lineartime.data import read_tokenizer
from lineartime.errors import LineartimeError

BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2}, "merges": []}
CHUNKS_OF_NOTHING = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}


def definition(**stages: Any) -> str:
    """A tokenizer of three characters with other stages."""
    others = dict.fromkeys(["truncation", "padding", "post_processor", "normalizer", "pre_tokenizer", "decoder"])
    return json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, **others, **stages})


def charsmap(content: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    "content",
    [
        "{",
        '{"normalizer": ' + "[" * 50_000,
        definition(decoder=3),
        definition(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        definition(normalizer=charsmap(b"ab")),  # at which the library panics
    ],
)
def test_what_is_no_definition_is_a_sentence(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(
        LineartimeError, match=r"tokenizer.json is not a tokenizer file \(.+\): give a tokenizer.json"
    ) as caught:
        read_tokenizer(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_panic_of_the_library_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(definition(decoder={"type": "Strip", "content": "a", "start": 5, "stop": 5}))
    with pytest.raises(LineartimeError, match=r"^The tokenizer .*tokenizer.json cannot decode tokens \(.+\)\.$"):
        read_tokenizer(file).decode([0])
    file.write_text(definition(**CHUNKS_OF_NOTHING))
    with pytest.raises(LineartimeError, match=r"^The tokenizer .*tokenizer.json cannot encode the text \(.+\)\.$"):
        read_tokenizer(file).encode("a")
