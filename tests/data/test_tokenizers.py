"""Tokenizers: encoding, decoding token by token, files, names, and training."""

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from lineartime.choices import TokenizerKind
from lineartime.cli import main
from lineartime.data import ByteTokenizer, JsonTokenizer, load_corpus, read_tokenizer, tokenizer_for, train_tokenizer
from lineartime.data.tokenizers import Tokenizer, named_tokenizer
from lineartime.errors import LineartimeError

TEXT = "naïve 日本 text\nwith two lines and 🚀\n"


def stream_decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoder = tokenizer.stream_decoder()
    return "".join(decoder.push(token) for token in ids) + decoder.flush()


@pytest.fixture(params=["bytes", "json"])
def tokenizer(request: pytest.FixtureRequest, bpe: JsonTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


@pytest.fixture
def across() -> JsonTokenizer:
    """A byte-level BPE tokenizer with a token that ends one character and begins the next, as large ones have."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    begin, _, end = split.pre_tokenize_str("日")[0][0]
    vocabulary = {letter: index for index, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), end + begin])}
    tokenizer = Library(models.BPE(vocabulary, [(end, begin)]))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    return JsonTokenizer(tokenizer.to_str(), "across.json")


@pytest.fixture
def fallback() -> JsonTokenizer:
    """A tokenizer that knows no character but has a token for each byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Library(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return JsonTokenizer(tokenizer.to_str(), "fallback.json")


def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).tolist()
    assert tokenizer.decode(ids) == TEXT
    specials = [tokenizer.end_of_document, tokenizer.mask]
    assert len({*ids, *specials}) == len(set(ids)) + 2
    assert max(*ids, *specials) < tokenizer.vocab_size
    assert tokenizer.decode([specials[0], *ids, *specials]) == TEXT
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(token) for token in [*ids, tokenizer.end_of_document]]
    assert "".join(pieces) + decoder.flush() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


def test_streamed_text_is_the_decoded_text_even_where_it_breaks(tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        ids = generator.integers(0, tokenizer.vocab_size - 2, 60).tolist() + [200] * generator.integers(0, 100)
        assert stream_decoded(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["日" * 100, "日本日本\ufffd日", "x\ufffd😀y", "\ufffd" * 20 + "日😀", "😀" * 50 + "é"])
def test_a_token_may_end_one_character_and_begin_the_next(text: str, across: JsonTokenizer, fallback: JsonTokenizer) -> None:
    for tokenizer in (across, fallback):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.stream_decoder()
        pieces = [decoder.push(token) for token in ids]
        assert "".join(pieces) + decoder.flush() == text
        assert "".join(pieces) == text.rstrip("\ufffd")  # as soon as it is known


def test_a_space_is_kept_behind_a_token_without_text() -> None:
    words = Library(models.WordPiece({"[UNK]": 0, "the": 1, "cats": 2, "house": 3}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    words.add_special_tokens(["[UNK]"])
    tokenizer = JsonTokenizer(words.to_str(), "words.json")
    for text in ("the cats ☃ house ☃ ☃ the", "☃ the", "the " + "☃ " * 100 + "house"):
        ids = tokenizer.encode(text).tolist()
        assert stream_decoded(tokenizer, ids) == tokenizer.decode(ids)


def test_the_beginning_of_a_text_is_what_its_first_tokens_encode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT).tolist()
    for count in range(len(ids) + 2):
        whole, beginning = tokenizer.decode(ids[:count]), tokenizer.beginning(TEXT, count)
        assert TEXT.startswith(beginning)
        assert (beginning == whole) if "\ufffd" not in whole else (len(beginning) == len(whole.rstrip("\ufffd")) + 1)


def test_a_vocabulary_with_gaps_is_as_large_as_its_highest_id() -> None:
    tokenizer = JsonTokenizer(Library(models.WordLevel({"a": 0, "b": 7}, unk_token="?")).to_str(), "gaps.json")
    assert (tokenizer.end_of_document, tokenizer.mask, tokenizer.vocab_size) == (8, 9, 10)
    with pytest.raises(LineartimeError, match=r"The tokenizer gaps.json cannot encode the text \(.*Missing"):
        tokenizer.encode("c")


def test_files_that_are_no_tokenizer_are_named(tmp_path: Path) -> None:
    for content in (b"{}", b"\xff\xfe"):
        (tmp_path / "wrong.json").write_bytes(content)
        with pytest.raises(LineartimeError, match="is not a tokenizer file"):
            read_tokenizer(tmp_path / "wrong.json")
    with pytest.raises(LineartimeError, match=r"Cannot read .*No such file"):
        read_tokenizer(tmp_path / "missing.json")


def test_a_tokenizer_of_the_hub_that_was_seen_needs_no_network_and_another_is_named(
    tmp_path: Path, bpe: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = tmp_path / "models--org--name", "a1" * 20
    for file, content in (("refs/main", commit), (f"snapshots/{commit}/tokenizer.json", bpe.to_json())):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(content)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert named_tokenizer("hub:org/name").encode(TEXT).tolist() == bpe.encode(TEXT).tolist()
    for name in ("hub:gpt3", "hub:a/b/c"):
        with pytest.raises(LineartimeError, match=rf"^tokenizer is {name}, which cannot be read .* \(.+\): check the name"):
            named_tokenizer(name)


# Training ---------------------------------------------------------------------------------------------------------------------

LINES = "naïve 日本 text.\n\tindented\n" * 20 + Path(textwrap.__file__).read_text()
KINDS: tuple[TokenizerKind, ...] = ("bpe", "unigram")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(LINES)
    return file


@pytest.fixture(scope="module")
def trained(text: Path) -> dict[TokenizerKind, JsonTokenizer]:
    return {kind: train_tokenizer(load_corpus(text), kind, 600) for kind in KINDS}


@settings(deadline=None, max_examples=50)  # other work on the machine must not make it fail
@given(st.text())
@example("<unk> <0x41> <|endoftext|> and [MASK] are text")
@example("  two\n\n\tspaces \u00a0\u3000 \r\n and trailing ")
@example("▁")
@example("e\u0301 \x00 \U0010ffff 猫")
def test_every_text_is_given_back_but_for_the_sign_of_a_space_in_unigram(
    trained: dict[TokenizerKind, JsonTokenizer], text: str
) -> None:
    for kind, tokenizer in trained.items():
        ids = tokenizer.encode(text).tolist()
        expected = text.replace("▁", " ") if kind == "unigram" else text
        assert tokenizer.decode(ids) == stream_decoded(tokenizer, ids) == expected
        assert not {tokenizer.end_of_document, tokenizer.mask} & set(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_encodes_the_same(
    trained: dict[TokenizerKind, JsonTokenizer], kind: TokenizerKind, tmp_path: Path
) -> None:
    tokenizer = trained[kind]
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    ids = tokenizer.encode(LINES).tolist()
    assert read_tokenizer(tmp_path).encode_batch(["", LINES])[1].tolist() == ids
    assert len(ids) < len(LINES.encode()) / 1.8
    assert max(tokenizer.end_of_document, tokenizer.mask) < 3
    assert max(ids) < tokenizer.vocab_size <= 600


def test_only_the_beginning_is_learned_from(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("aaaa bbbb\n" * 500 + "zzzz\n" * 500)
    few = train_tokenizer(load_corpus(tmp_path / "train.txt"), "bpe", 300, max_bytes=1000)
    assert len(few.encode("aaaa")) == 1
    assert len(few.encode("zzzz")) == 4
    (tmp_path / "zh.txt").write_text("天地玄黄\n" * 200)  # a limit within the first character includes that one
    assert train_tokenizer(load_corpus(tmp_path / "zh.txt"), "unigram", 560, max_bytes=1).decode([]) == ""


def test_overlong_words_do_not_slow_down_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    module = sys.modules[train_tokenizer.__module__]
    monkeypatch.setattr(module, "_train_bpe", lambda _, texts, size: learned.extend(texts))
    monkeypatch.setattr(module, "JsonTokenizer", lambda *_: None)
    words = ["ACGT" * 500, "天地玄黄" * 200, "3141" * 200, "=" * 700, "_" * 700, "b" * 499, " " * 800, "a 1-" * 2000]
    (tmp_path / "train.txt").write_text(" ".join(words))
    train_tokenizer(load_corpus(tmp_path / "train.txt"), "bpe", 300)
    assert " ".join(words).startswith("".join(learned))  # the rest is held out
    assert max(len(run) for text in learned for run in re.findall(r"\w+|\s+|=+", text)) == 500
    assert any("b" * 499 in text for text in learned)


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_spaces_gives_a_tokenizer_that_knows_them(tmp_path: Path, kind: TokenizerKind) -> None:
    file = tmp_path / "zh.txt"
    file.write_text("天地玄黄宇宙洪荒日月盈昃辰宿列张\n" * 200)
    tokenizer = train_tokenizer(load_corpus(file), kind, 560)
    ids = tokenizer.encode("a  b 天").tolist()
    assert tokenizer.decode(ids) == stream_decoded(tokenizer, ids) == "a  b 天"
    assert len(tokenizer.encode(" ")) == 1


def test_an_option_names_a_tokenizer(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_corpus(text)
    for choice in (None, "bytes"):
        assert isinstance(tokenizer_for(choice, corpus, tmp_path), ByteTokenizer)
    made = tokenizer_for("bpe-300", corpus, tmp_path)
    (tmp_path / "other.txt").write_text("bbbbb\n" * 1000)
    assert tokenizer_for("bpe-300", load_corpus(tmp_path / "other.txt"), tmp_path).to_json() != made.to_json()
    assert made.vocab_size == 300
    (tmp_path / "own.json").write_text(made.to_json())
    for choice in (str(tmp_path / "own.json"), tmp_path / "own.json"):
        assert tokenizer_for(choice, corpus, tmp_path).to_json() == made.to_json()
    monkeypatch.setattr(sys.modules[train_tokenizer.__module__], "train_tokenizer", None)  # nothing is trained from here on
    assert tokenizer_for("bpe-300", corpus, tmp_path).to_json() == made.to_json()


def test_a_tokenizer_that_cannot_be_trained_or_found_is_an_error(text: Path, tmp_path: Path) -> None:
    corpus = load_corpus(text)
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "han.txt").write_text("\n".join(chr(0x4E00 + number) for number in range(3000)))
    empty, han = load_corpus(tmp_path / "empty.jsonl"), load_corpus(tmp_path / "han.txt")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: train_tokenizer(corpus, "unigram", 100), "^vocab_size is 100, but must be at least 517"),
        (lambda: train_tokenizer(corpus, "BPE", 300), r"^kind is 'BPE', but must be one of 'bpe', 'unigram'"),  # type: ignore[arg-type]
        (lambda: train_tokenizer(corpus, "bpe", 300, max_bytes=0), "^max_bytes is 0, but must be at least 1"),
        (lambda: train_tokenizer(empty, "bpe", 300), "There is no text in the train split of"),
        (lambda: train_tokenizer(han, "unigram", 1000), r"vocab_size is 1,000, too few for the characters of this text \("),
        (lambda: tokenizer_for("", corpus, tmp_path), "^tokenizer is empty: "),
        (lambda: tokenizer_for("bpe-9", corpus, tmp_path), "^tokenizer is bpe-9, but bpe tokenizers have from 260 to"),
        (lambda: tokenizer_for("bpe-many", corpus, tmp_path), "^tokenizer is bpe-many, which is neither a file nor a name:"),
    ]
    for action, message in cases:
        with pytest.raises(LineartimeError, match=message):
            action()


def test_the_command_writes_a_tokenizer_and_never_over_another(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "tokenizer.json"
    arguments = ["tokenize", "--data", str(text), "--kind", "unigram", "--vocab-size", "31000", "--out", str(out)]
    assert main(arguments) == 0
    printed, said = capsys.readouterr()
    assert f"{out}: unigram of " in printed
    assert re.search(r"has [\d,]+ tokens instead of 31,000, because the text is too short for more: use .*\.", said)
    assert read_tokenizer(out).decode(read_tokenizer(out).encode("naïve").tolist()) == "naïve"
    assert main(arguments) == 1
    assert "exists already: delete it, or choose another name" in capsys.readouterr().err
    assert main(["tokenize", "--data", str(text), "--out", f"{out}.new", "--vocab-size", "9"]) == 1
    assert "--vocab-size is 9, but must be at least 260" in capsys.readouterr().err
    assert [file.name for file in out.parent.iterdir()] == ["tokenizer.json"]
