"""A catalogue of what a tokenizer from elsewhere can do to the Rust library that runs it: each ends in one sentence."""

import base64
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lineartime.cli import main
from lineartime.data import read_tokenizer, tokenizer_trial
from lineartime.data.tokenizers import JsonTokenizer
from lineartime.errors import LineartimeError

Plain = dict[str, Any]
BPE: Plain = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "vocab": {"a": 0, "b": 1, " ": 2},
    "merges": [],
}
HEADER: Plain = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None}


def definition(**stages: Any) -> str:
    """A tokenizer of three characters with other stages."""
    stages = {"normalizer": None, "pre_tokenizer": None, "decoder": None, "model": BPE, **stages}
    return json.dumps({**HEADER, **stages})


def charsmap(content: bytes) -> Plain:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def replace(pattern: Plain, content: str) -> Plain:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, part: Plain, count: int) -> Plain:
    return {"type": "Sequence", kind: [part] * count}


PANICS: dict[str, Plain] = {
    "a chunk of no characters": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a chunk of no characters, in a sequence": {
        "pre_tokenizer": sequence("pretokenizers", {"type": "FixedLength", "length": 0}, 1)
    },
    "a decoder that strips more than there is": {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 5}},
    "a decoder that strips for ever": {"decoder": {"type": "Strip", "content": "a", "start": 2**60, "stop": 2**60}},
    "no map of characters": {"normalizer": charsmap(b"")},
    "a map of characters cut off": {"normalizer": charsmap(b"ab")},
    "a map of characters that claims gigabytes": {"normalizer": charsmap(b"\xff\xff\xff\x7f" + bytes(8))},
    "a map of characters that points outside": {"normalizer": charsmap(b"\x10\0\0\0" + bytes(range(40)))},
    "a prefix of another length in bytes": {
        "model": {**BPE, "continuing_subword_prefix": "é", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    },
}
GROWS: dict[str, Plain] = {
    "one character to many": {"normalizer": replace({"String": "a"}, "a" * 33)},
    "a pattern to many": {"normalizer": replace({"Regex": "[^b]"}, "a" * 10**6)},
    "between all characters": {"normalizer": replace({"String": ""}, "a" * 40)},
    "twice, forty times": {"normalizer": sequence("normalizers", replace({"String": "a"}, "aa"), 40)},
    "a beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}},
    "a map of characters": {"normalizer": charsmap(b"\x04\0\0\0" + bytes(4) + b"a" * 1000 + b"\0")},
    "in the decoder": {"decoder": replace({"String": "a"}, "a" * 1000)},
    "in the decoder, in a sequence": {"decoder": sequence("decoders", replace({"String": "a"}, "aaa"), 4)},
}
WRONG: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "it is not JSON"),
    "a list": ("[]", "it is [], but must be an object"),
    "a field twice": ('{"normalizer": {"type": "NFC", "type": "Precompiled"}}', "it has the field 'type' twice"),
    "deep": ('{"normalizer": ' + "[" * 50_000, "lists and objects nested more than 40 levels deep"),
    "nothing in it": ("{}", "is not a tokenizer file"),
    "a stage that is a number": (definition(decoder=3), "is not a tokenizer file"),
    "a stage of an unknown type": (definition(normalizer={"type": "Magic"}), "is not a tokenizer file"),
    "a stage with a type of a list": (definition(normalizer={"type": ["NFC"]}), "is not a tokenizer file"),
    "a broken pattern": (
        definition(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
        "is not a tokenizer file",
    ),
}


def check(source: Path, said: str, *parts: str) -> None:
    assert "\n" not in said
    assert len(said) < 600
    assert said.startswith(str(source))
    for part in parts:
        assert part in said, said


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tokenizer.json"
    tokenizer_trial._problem.cache_clear()


@pytest.mark.parametrize("case", PANICS)
def test_a_panic_of_the_library_is_a_sentence_and_nothing_is_printed(
    case: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text(definition(**PANICS[case]))
    with pytest.raises(LineartimeError) as caught:
        read_tokenizer(file)
    ends = "crashed, or needed more than 4 GiB" if "gigabytes" in case else "fails on it: "
    check(file, str(caught.value), f"is not a tokenizer file that can be used (the tokenizers library {ends}")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("case", GROWS)
def test_a_text_that_would_grow_without_bound_is_refused_before_the_library_sees_it(
    case: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(subprocess, "run")
    file.write_text(definition(**GROWS[case]))
    with pytest.raises(LineartimeError) as caught:
        read_tokenizer(file)
    check(file, str(caught.value), " characters of one, but at most 32 are allowed")


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_definition_is_a_sentence(case: str, file: Path) -> None:
    content, what = WRONG[case]
    file.write_text(content)
    with pytest.raises(LineartimeError) as caught:
        read_tokenizer(file)
    check(file, str(caught.value), what)


def test_a_panic_that_only_some_texts_cause_is_a_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "_try", lambda definition: "")
    for stage, use in (("decoder", lambda t: t.decode([0])), ("pre_tokenizer", lambda t: t.encode("a"))):
        stages = {"decoder": PANICS["a decoder that strips more than there is"]["decoder"]}
        stages = stages if stage == "decoder" else PANICS["a chunk of no characters"]
        tokenizer = JsonTokenizer(definition(**stages), str(file))
        with pytest.raises(LineartimeError) as caught:
            use(tokenizer)
        check(file, str(caught.value), "the tokenizers library fails on it: ")


def test_an_interrupt_is_no_panic() -> None:
    with pytest.raises(KeyboardInterrupt), tokenizer_trial.no_panics("x"):
        raise KeyboardInterrupt


def test_a_definition_that_takes_all_memory_or_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    strip = definition(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 0}).encode()
    begin = "import sys, os\nsys.stdin.buffer.read()\n"
    assert tokenizer_trial._try(strip) == ""
    monkeypatch.setattr(tokenizer_trial, "_TRIAL", begin + "os.abort()")
    assert "needed more than 4 GiB" in tokenizer_trial._try(strip)
    monkeypatch.setattr(tokenizer_trial, "_TRIAL", tokenizer_trial._TRIAL.replace("os.abort()", "while True: pass"))
    monkeypatch.setattr(tokenizer_trial, "_SECONDS", 0.5)
    start = time.monotonic()
    assert "took longer than 0.5 s" in tokenizer_trial._try(strip)
    assert time.monotonic() - start < 60  # it is ended: it would go on for ever


def test_usual_tokenizers_are_read_as_before(file: Path) -> None:
    llama = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                replace({"String": "\u2581"}, " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {**BPE, "vocab": {"a": 0, "b": 1, "\u2581": 2}},
    }
    file.write_text(definition(**llama))
    tokenizer = read_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode("a b").tolist()) == "a b"


def test_a_file_that_is_too_large_is_not_parsed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lineartime.data.tokenizers.MAX_BYTES", 1 << 20)
    file.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(LineartimeError, match="larger than 1 MiB"):
        read_tokenizer(file)


def test_the_command_line_names_it(file: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(definition(**PANICS["a chunk of no characters"]))
    out = file.parent / "run"
    assert main(["train", "--data", str(text), "--tokenizer", str(file), "--steps", "1", "--out", str(out)]) == 1
    said = capsys.readouterr().err.strip()
    check(Path(f"error: {file}"), said, "chunk size must be non-zero")
    assert not out.exists()
