import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lineartime.cli import main
from lineartime.data import ByteTokenizer, JsonTokenizer, load_corpus, read_tokenizer, tokenizer_for, train_tokenizer
from lineartime.data.tokenizers import Tokenizer
from lineartime.errors import LineartimeError

LINES = "naïve 日本 text.\n\tindented\n" * 20 + Path(textwrap.__file__).read_text()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(LINES)
    return file


@pytest.fixture(scope="module")
def tokenizer(text: Path) -> JsonTokenizer:
    return train_tokenizer(load_corpus(text), 600)


def stream_decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.stream_decoder()
    return "".join(decoder.push(token) for token in ids) + decoder.flush()


@settings(deadline=None, max_examples=50)  # other work on the machine must not make it fail
@given(st.text())
@example("<unk> <0x41> <|endoftext|> and [MASK] are text")
@example("  two\n\n\tspaces \u00a0\u3000 \r\n and trailing ")
@example("▁")
@example("e\u0301 \x00 \U0010ffff 猫")
def test_every_text_is_given_back(tokenizer: JsonTokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == stream_decoded(tokenizer, ids) == text
    assert not {tokenizer.end_of_document, tokenizer.mask} & set(ids)


def test_a_saved_tokenizer_encodes_the_same(tokenizer: JsonTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    ids = tokenizer.encode(LINES).tolist()
    assert read_tokenizer(tmp_path).encode_batch(["", LINES])[1].tolist() == ids
    assert len(ids) < len(LINES.encode()) / 1.8
    assert max(tokenizer.end_of_document, tokenizer.mask) < 3
    assert max(ids) < tokenizer.vocab_size <= 600


def test_only_the_beginning_is_learned_from(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("aaaa bbbb\n" * 500 + "zzzz\n" * 500)
    few = train_tokenizer(load_corpus(tmp_path / "train.txt"), 300, max_bytes=1000)
    assert len(few.encode("aaaa")) == 1
    assert len(few.encode("zzzz")) == 4
    (tmp_path / "zh.txt").write_text("天地玄黄\n" * 200)  # a limit within the first character includes that one
    assert train_tokenizer(load_corpus(tmp_path / "zh.txt"), 300, max_bytes=1).decode([]) == ""


def test_overlong_words_do_not_slow_down_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    module = sys.modules[train_tokenizer.__module__]
    monkeypatch.setattr(module, "_train_bpe", lambda texts, size: learned.extend(texts))
    monkeypatch.setattr(module, "JsonTokenizer", lambda *_: None)
    words = ["ACGT" * 500, "天地玄黄" * 200, "3141" * 200, "=" * 700, "_" * 700, "b" * 499, " " * 800, "a 1-" * 2000]
    (tmp_path / "train.txt").write_text(" ".join(words))
    train_tokenizer(load_corpus(tmp_path / "train.txt"), 300)
    assert " ".join(words).startswith("".join(learned))  # the rest is held out
    assert max(len(run) for text in learned for run in re.findall(r"\w+|\s+|=+", text)) == 500
    assert any("b" * 499 in text for text in learned)


def test_text_without_spaces_gives_a_tokenizer_that_knows_them(tmp_path: Path) -> None:
    file = tmp_path / "zh.txt"
    file.write_text("天地玄黄宇宙洪荒日月盈昃辰宿列张\n" * 200)
    tokenizer = train_tokenizer(load_corpus(file), 560)
    ids = tokenizer.encode("a  b 天").tolist()
    assert tokenizer.decode(ids) == stream_decoded(tokenizer, ids) == "a  b 天"
    assert len(tokenizer.encode(" ")) == 1


def test_an_option_names_a_tokenizer(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_corpus(text)
    for choice in (None, "bytes"):
        assert isinstance(tokenizer_for(choice, corpus, tmp_path), ByteTokenizer)
    trained = tokenizer_for("bpe-300", corpus, tmp_path)
    (tmp_path / "other.txt").write_text("bbbbb\n" * 1000)
    assert tokenizer_for("bpe-300", load_corpus(tmp_path / "other.txt"), tmp_path).to_json() != trained.to_json()
    assert trained.vocab_size == 300
    (tmp_path / "own.json").write_text(trained.to_json())
    for choice in (str(tmp_path / "own.json"), tmp_path / "own.json"):
        assert tokenizer_for(choice, corpus, tmp_path).to_json() == trained.to_json()
    monkeypatch.setattr(sys.modules[train_tokenizer.__module__], "train_tokenizer", None)  # nothing is trained from here on
    assert tokenizer_for("bpe-300", corpus, tmp_path).to_json() == trained.to_json()


def test_a_tokenizer_that_cannot_be_trained_or_found_is_an_error(text: Path, tmp_path: Path) -> None:
    corpus = load_corpus(text)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    empty = load_corpus(tmp_path / "empty.jsonl")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: train_tokenizer(corpus, 100), "^vocab_size is 100, but must be at least 260"),
        (lambda: train_tokenizer(corpus, 300, max_bytes=0), "^max_bytes is 0, but must be at least 1"),
        (lambda: train_tokenizer(empty, 300), "There is no text in the train split of"),
        (lambda: tokenizer_for("", corpus, tmp_path), "^tokenizer is empty: "),
        (lambda: tokenizer_for("bpe-9", corpus, tmp_path), "^tokenizer is bpe-9, but bpe tokenizers have from 260 to"),
        (lambda: tokenizer_for("unigram-600", corpus, tmp_path), "^tokenizer is unigram-600, .* use bpe-600, or train another"),
        (lambda: tokenizer_for("bpe-many", corpus, tmp_path), "^tokenizer is bpe-many, which is neither a file nor a name:"),
    ]
    for action, message in cases:
        with pytest.raises(LineartimeError, match=message):
            action()


def test_the_command_writes_a_tokenizer_and_never_over_another(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tokenizer.json"
    arguments = ["tokenize", "--data", str(text), "--vocab-size", "550", "--out", str(out)]
    assert main(arguments) == 0
    assert f"{out}: BPE of 5" in capsys.readouterr().out
    assert read_tokenizer(out).decode(read_tokenizer(out).encode("naïve").tolist()) == "naïve"
    assert main(arguments) == 1
    assert "exists already: delete it, or choose another name" in capsys.readouterr().err


def test_the_command_says_when_there_was_too_little_text(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.json")
    assert main(["tokenize", "--data", str(text), "--out", out, "--vocab-size", "31000"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"has [\d,]+ tokens instead of 31,000, because the text is too short for more: use .*\.", said)
    assert main(["tokenize", "--data", str(tmp_path / "missing"), "--out", f"{out}.new", "--vocab-size", "9"]) == 1
    assert "--vocab-size is 9, but must be at least 260" in capsys.readouterr().err  # before it looks for the text
