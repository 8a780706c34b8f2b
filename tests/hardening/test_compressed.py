"""Compressed files that become huge: each ends in one sentence before it fills memory or a disk."""

import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from lineartime.cli import main
from lineartime.data import load_corpus, local_files
from lineartime.errors import ArgumentError


def zipped(content: bytes, file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text.txt", content)


WRITERS: dict[str, Callable[[bytes, Path], object]] = {
    ".gz": lambda content, file: file.write_bytes(gzip.compress(content)),
    ".xz": lambda content, file: file.write_bytes(lzma.compress(content)),
    ".zst": lambda content, file: file.write_bytes(zstandard.ZstdCompressor().compress(content)),
    ".zip": zipped,
}
SIZE = 3_000_000
BOMBS = {
    ".txt": b"a" * SIZE,
    ".jsonl": b'{"text": "' + b"a" * SIZE + b'"}',
    ".json": b'[{"text": "' + b"a" * SIZE + b'"}]',
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "_SMALL", 1 << 20)


def read(file: Path, most: int) -> int:
    """The characters of all documents of a file."""
    corpus = load_corpus(str(file), max_expansion=most)
    return sum(len(block) for document in corpus.documents("all") for block in document)


@pytest.mark.parametrize(("suffix", "kind"), [(".gz", ".txt"), (".xz", ".jsonl"), (".zst", ".json"), (".zip", ".txt")])
def test_a_file_that_becomes_many_times_its_size_is_refused(suffix: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"bomb{kind}{suffix}"
    WRITERS[suffix](BOMBS[kind], file)
    with pytest.raises(ArgumentError) as caught:
        read(file, 2)
    what = f"max_expansion is 2, but {file} expands to more than that many times its size: "
    assert str(caught.value) == what + "give a larger number if the file is correct, or leave it out."
    assert read(file, 10**6) == SIZE


def test_parquet_of_one_text_again_and_again_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 1000] * 3000}), file)
    with pytest.raises(ArgumentError, match=r"^max_expansion is 2, but .*bomb.parquet expands to more than"):
        read(file, 2)
    assert read(file, 10**6) == SIZE


def test_few_bytes_may_become_any_number_of_times_as_many(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a" * 900_000))
    assert read(tmp_path / "a.txt.gz", 1) == 900_000


def test_the_commands_name_the_option_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bomb.txt.xz"
    file.write_bytes(lzma.compress(b"a" * (1 << 24)))
    cache, out = tmp_path / "cache", tmp_path / "run"
    options = ["--data", str(file), "--max-expansion", "50"]
    assert main(["train", *options, "--cache", str(cache), "--out", str(out), "--steps", "1"]) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"error: --max-expansion is 50, but {file} expands to more")
    assert not out.exists()
    assert not list(cache.glob("*"))
    assert main(["tokenize", *options, "--out", str(tmp_path / "tokenizer.json")]) == 1
    assert "--max-expansion is 50" in capsys.readouterr().err


def test_a_run_is_measured_with_the_limit_it_was_trained_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "text.jsonl.gz", str(tmp_path / "run")
    lines = "".join(json.dumps({"text": "a b " * 500}) + "\n" for _ in range(1000))
    file.write_bytes(gzip.compress(lines.encode()))
    tiny = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=8", "--context-length", "24", "--steps", "1"]
    where = ["--data", str(file), "--cache", str(tmp_path / "cache"), "--out", run, "--eval-windows", "1"]
    assert main(["train", *tiny, *where, "--max-expansion", "1000"]) == 0
    measured = ["eval", run, "--max-tokens", "20", "--split", "all"]
    assert main([*measured, "--cache", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    assert main(["eval", run, "--split", "all", "--max-expansion", "2", "--cache", str(tmp_path / "third")]) == 1
    assert "error: --max-expansion is 2, but " in capsys.readouterr().err
