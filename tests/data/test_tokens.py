import os
import time
from pathlib import Path

import numpy as np
import pytest

from lineartime.data import ByteTokenizer, Corpus, local_text, token_stream
from lineartime.data import tokens as tokens_module
from lineartime.data.corpora import Document
from lineartime.errors import LineartimeError

BYTES = ByteTokenizer()


def corpus_of(*files: Path) -> Corpus:
    return Corpus("these files", {"train": [Document(file, 0, file.stat().st_size) for file in files]})


def test_documents_stand_in_a_row_each_with_its_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("é")
    stream = token_stream(corpus_of(tmp_path / "a", tmp_path / "b"), "train", BYTES, tmp_path / "cache")
    assert stream.tokens.tolist() == [97, 98, 256, 0xC3, 0xA9, 256]
    assert stream.n_bytes == 4
    assert isinstance(stream.tokens, np.memmap)


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"zeile {i} üöä日\n" for i in range(50))
    (tmp_path / "a").write_text(text)
    monkeypatch.setattr(tokens_module, "_BLOCK", 7)  # smaller than a line, and it cuts characters
    stream = token_stream(corpus_of(tmp_path / "a"), "train", BYTES, tmp_path / "cache")
    assert BYTES.decode(stream.tokens.tolist()) == text


def test_text_is_encoded_once_and_again_only_after_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_text("first")
    token_stream(corpus_of(file), "train", BYTES, cache)
    encode = BYTES.encode
    calls: list[str] = []
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: calls.append(text) or encode(text))
    token_stream(corpus_of(file), "train", BYTES, cache)
    assert calls == []
    file.write_text("other")
    os.utime(file, (time.time() + 5, time.time() + 5))
    assert BYTES.decode(token_stream(corpus_of(file), "train", BYTES, cache).tokens.tolist()) == "other"
    assert calls == ["other"]


@pytest.mark.parametrize("prefix", [b"", b"x" * 20, "日".encode()])
def test_a_byte_that_is_not_utf8_is_named_with_its_place(
    tmp_path: Path, prefix: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "latin1.txt"
    file.write_bytes(prefix + b"caf\xe9 au lait")
    monkeypatch.setattr(tokens_module, "_BLOCK", 8)
    with pytest.raises(LineartimeError, match=rf"latin1.txt is not UTF-8 text \(byte 0xe9 at offset {len(prefix) + 3}\)"):
        token_stream(corpus_of(file), "train", BYTES, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_text_that_ends_within_a_character_is_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "cut.txt"
    file.write_bytes("日".encode()[:2])
    with pytest.raises(LineartimeError, match=r"byte 0xe6 at offset 0"):
        token_stream(corpus_of(file), "train", BYTES, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(LineartimeError, match=r"Cannot write .*cache"):
        token_stream(corpus_of(tmp_path / "a"), "train", BYTES, tmp_path / "cache")


@pytest.mark.parametrize("damage", ["truncate", "garbage"])
def test_a_damaged_token_file_is_named(tmp_path: Path, damage: str) -> None:
    (tmp_path / "a").write_text("text")
    token_stream(corpus_of(tmp_path / "a"), "train", BYTES, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    if damage == "truncate":
        (folder / "tokens.bin").write_bytes(b"1")
    else:
        (folder / "tokens.json").write_text("{")
    with pytest.raises(LineartimeError, match="is damaged: delete that folder"):
        token_stream(corpus_of(tmp_path / "a"), "train", BYTES, tmp_path / "cache")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    corpus = corpus_of(tmp_path / "a")
    (tmp_path / "a").unlink()
    (tmp_path / "a").mkdir()  # root may read everything but a folder
    with pytest.raises(LineartimeError, match=r"Cannot read .*Is a directory"):
        token_stream(corpus, "train", BYTES, tmp_path / "cache")


def test_the_three_splits_of_a_file_are_the_file(tmp_path: Path) -> None:
    text = "".join(f"{i}\n" for i in range(500))
    (tmp_path / "a").write_text(text)
    corpus = local_text(tmp_path / "a")
    parts = [token_stream(corpus, split, BYTES, tmp_path / "cache").tokens.tolist() for split in corpus.splits]
    assert "".join(BYTES.decode(part) for part in parts) == text
