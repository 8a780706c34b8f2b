"""Shards in the formats of other packages, of which tests/assets holds those that their own writers made."""

import json
import shutil
import tracemalloc
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lineartime.cli import main
from lineartime.data import (
    BatchMaker,
    ByteTokenizer,
    CachedLoader,
    Rows,
    TokenStream,
    load_corpus,
    read_tokenizer,
    read_window,
    token_stream,
)
from lineartime.data import shards as shards_module
from lineartime.data import tokens as tokens_module
from lineartime.data.readers import SPLITS
from lineartime.data.shards import unmarked
from lineartime.data.tokens import write_shard
from lineartime.errors import LineartimeError
from lineartime.training.config import TrainConfig

from .conftest import documents as texts_of
from .conftest import write

UNPACKED = TemporaryDirectory()  # until the end of the tests
ASSETS = Path(UNPACKED.name)
shutil.unpack_archive(Path(__file__).parent.parent / "assets" / "shards.zip", ASSETS)
EXPECTED = json.loads((ASSETS / "expected.json").read_text())
IDS: list[list[int]] = EXPECTED["ids"]
FLAT = [token for ids in IDS for token in [*ids, 256]]  # with the end of a document after each
BYTES = ByteTokenizer()


def stream_of(path: Path, cache: Path, split: Any = "all", **options: Any) -> TokenStream:
    return token_stream(load_corpus(path, **options), split, BYTES, cache)


def read(path: Path, cache: Path, split: Any = "all", **options: Any) -> list[int]:
    stream = stream_of(path, cache, split, **options)
    return unmarked(read_window(stream, 0, len(stream))).tolist()


def documents(path: Path, cache: Path, **options: Any) -> list[list[int]]:
    stream = stream_of(path, cache, **options)
    marked = read_window(stream, 0, len(stream))
    ends = (marked < 0).nonzero().flatten() + 1
    return [part.tolist() for part in unmarked(marked).tensor_split(ends)[:-1]]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("megatron/uint16_text_document", {}),
        ("megatron/int32_text_document.bin", {}),
        ("mds-any", {}),
        ("mds-uint16-zstd", {}),
        ("mds-fixed", {}),
        ("mds-bytes", {"raw_ids": "int64"}),
    ],
)
def test_shards_of_other_packages_have_their_documents_and_each_token_is_in_one_split(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    expected = [ids[:3] for ids in IDS] if "fixed" in name else IDS
    for _ in range(2):  # the second time from the cache
        assert documents(ASSETS / name, tmp_path, **options) == expected
    parts = [read(ASSETS / name, tmp_path, split, **options) for split in SPLITS]
    assert sorted(chain(*parts)) == sorted(chain(*expected))
    assert all(parts)


@pytest.mark.parametrize("name", ["mds-text", "mds-text-zstd", "litdata", "litdata-columns", "webdataset"])
def test_shards_of_text_have_their_texts(name: str) -> None:
    corpus = load_corpus(ASSETS / name)
    assert texts_of(corpus) == EXPECTED["texts"]
    assert corpus.notes == ()


def llm_c(magic: int = 20240520, version: int = 1, dtype: Any = np.uint16, count: int = len(FLAT)) -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, count
    return header.tobytes() + np.array(FLAT, dtype).tobytes()


SHORT, LONG = np.array(FLAT, np.uint16).tobytes(), np.array(FLAT, np.uint32).tobytes()


@pytest.mark.parametrize(
    ("files", "raw_ids"),
    [
        ({"train.bin": SHORT, "val.bin": SHORT, "prepare.py": b"# encodes\n" * 99, "meta.pkl": b"\x80"}, "uint16"),
        ({"fineweb_train_000001.bin": llm_c(), "fineweb_val_000000.bin": llm_c()}, None),
        ({"a_train_0.bin": llm_c(20240801, 7, np.uint32), "a_val_0.bin": llm_c(20240801, 7, np.uint32)}, None),
        ({"part-0-00000.npy": SHORT, "part-1-00000.npy": SHORT}, "uint16"),
        ({"train/0.npy": LONG, "valid/0.npy": LONG}, "uint32"),
    ],
)
def test_files_of_ids_alone_are_read_where_they_lie(tmp_path: Path, files: dict[str, bytes], raw_ids: str | None) -> None:
    folder = write(tmp_path / "shards", files)
    stream = stream_of(folder, tmp_path / "cache", raw_ids=raw_ids)
    for start in (0, 5, len(FLAT) + 5):  # a window may begin in any file, and end in another
        assert unmarked(read_window(stream, start, len(FLAT) * 2)).tolist() == (FLAT * 2)[start:]
    assert not (tmp_path / "cache").exists()
    left_out = load_corpus(folder, raw_ids=raw_ids).notes  # type: ignore[arg-type]
    assert left_out == (
        (f"Left out of {folder}, because its shards are raw ids: 2 files (meta.pkl, prepare.py).",)
        if "val.bin" in files
        else ()
    )


def test_numpy_files_say_their_dtype(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(FLAT))
    assert read(tmp_path / "a.npy", tmp_path / "cache") == FLAT
    content = (tmp_path / "a.npy").read_bytes()
    for damage in (content[:-8], content[:60], content[:20] + b"\0((" + content[23:]):
        (tmp_path / "a.npy").write_bytes(damage)
        with pytest.raises(LineartimeError, match=r"a.npy is damaged or cut off \("):
            read(tmp_path / "a.npy", tmp_path / "cache")
    np.save(tmp_path / "a.npy", np.array([IDS[0][:3]]))
    with pytest.raises(LineartimeError, match=r"a.npy has int64 \[1, 3\], but must have one row of whole numbers"):
        read(tmp_path / "a.npy", tmp_path / "cache")


def test_columns_of_ids_are_read_from_save_to_disk_arrow_and_parquet(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": IDS, "url": ["x"] * len(IDS)})
    rows.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "saved" / "cache-1.arrow").write_bytes((tmp_path / "saved" / "data-00000-of-00003.arrow").read_bytes())
    datasets.DatasetDict(train=rows, test=rows.select(range(4))).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "rows").mkdir()
    rows.to_parquet(str(tmp_path / "rows" / "0.parquet"))
    with (
        pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, rows.data.table.schema) as writer,
    ):
        writer.write_table(rows.data.table.slice(2))
    for name in ("saved", "rows"):
        assert documents(tmp_path / name, tmp_path / "cache") == IDS
    assert documents(tmp_path / "file.arrow", tmp_path / "cache") == IDS[2:]
    assert read(tmp_path / "splits", tmp_path / "cache", "test") == [*chain(*IDS[:4])]
    with pytest.raises(LineartimeError, match="holds token ids, and not text: give the tokenizer"):
        list(load_corpus(tmp_path / "rows").documents("all"))


def test_place_of_a_cut_ends_a_document(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    for split in SPLITS:
        stream = stream_of(tmp_path / "a.bin", tmp_path / "cache", split, raw_ids="uint16")
        ends = (read_window(stream, 0, len(stream)) < 0).nonzero().flatten().tolist()
        assert ends == ([len(stream) - 1] if split != "test" else [])  # where the file ends, its end tokens tell
        assert stream.n_documents == 0
        pair = stream_of(ASSETS / "megatron" / "uint16_text_document", tmp_path / "cache", split)
        marked = read_window(pair, 0, len(pair))
        assert marked[-1] < 0
        assert pair.n_documents == int((marked < 0).sum())


def test_limit_of_tokens_counts_the_documents_that_begin_before_it(tmp_path: Path) -> None:
    corpus, total = load_corpus(ASSETS / "megatron" / "uint16_text_document"), sum(map(len, IDS))
    for limit, n_documents, is_cut in ((len(IDS[0]), 1, True), (len(IDS[0]) + 1, 2, True), (total + 1, len(IDS), False)):
        stream = token_stream(corpus, "all", BYTES, tmp_path, limit)
        assert (stream.n_documents, stream.is_cut) == (n_documents, is_cut)


def test_few_ids_beside_text_are_left_out(tmp_path: Path) -> None:
    np.save(write(tmp_path, {"a.txt": "a text of words, again and again\n" * 50}) / "labels.npy", np.arange(20))
    corpus = load_corpus(tmp_path)
    assert texts_of(corpus)[0].startswith("a text of words")
    assert any("labels.npy" in note for note in corpus.notes)


def test_first_row_may_be_null_and_the_place_of_a_wrong_id_is_that_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "_ROWS", 2)
    rows = pyarrow.table({"input_ids": pyarrow.array([None, [1, 2], [3], [4, 300]], pyarrow.list_(pyarrow.int64()))})
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(LineartimeError, match=r"a\.parquet has the id 300 at token 4, but the vocabulary has 258"):
        read(tmp_path / "a.parquet", tmp_path / "cache")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows, 2)
    with pytest.raises(LineartimeError, match=r"a\.arrow has the id 300 at token 4, but the vocabulary has 258"):
        read(tmp_path / "a.arrow", tmp_path / "cache")


def test_copy_of_ids_that_is_not_whole_is_made_again_or_to_be_deleted(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": IDS}), tmp_path / "a.parquet")
    expected = read(tmp_path / "a.parquet", tmp_path / "cache")
    (copy,) = (tmp_path / "cache").glob("*.bin")
    copy.unlink()
    assert read(tmp_path / "a.parquet", tmp_path / "cache") == expected
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(LineartimeError, match=rf"{copy} is damaged or cut off: delete it to copy the ids of .*a.parquet again"):
        read(tmp_path / "a.parquet", tmp_path / "cache")


def test_documents_end_where_the_format_says_and_at_the_end_token(tmp_path: Path) -> None:
    stream = stream_of(ASSETS / "megatron" / "int32_text_document", tmp_path)
    [batch] = CachedLoader(stream, BatchMaker(BYTES, "clm", packed=True), len(stream) - 1, Rows(1, 1)).next_step()
    assert batch.lengths().tolist() == [len(ids) for ids in IDS[:-1]] + [len(IDS[-1]) - 1]
    assert batch.inputs.min() >= 0
    ends = np.cumsum([len(ids) for ids in IDS[:-1]]) - 1
    assert (batch.targets[0] < 0).nonzero().flatten().tolist() == ends.tolist()


def test_the_name_of_a_pair_of_files_is_found_from_any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ASSETS / "megatron")
    [kept] = TrainConfig(data=("int32_text_document",)).data
    assert kept == str(ASSETS / "megatron" / "int32_text_document")


SMALL = "--context 16 --batch-size 2 --eval-every 2 --eval-windows 2 --compile off --threads 1 --device cpu --precision fp32"
MODEL = ["--override", "d_model=16", "n_blocks=1", "d_qk=8", "chunk_size=16"]


@pytest.mark.parametrize("name", ["megatron/uint16_text_document", "mds-uint16-zstd", "mds-text", "webdataset"])
def test_a_run_on_shards_resumes_to_the_bit(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def train(out: str, *options: str) -> str:
        paths = ["--out", str(tmp_path / out), "--cache", str(tmp_path / "cache")]
        assert main(["train", *paths, *options]) == 0, capsys.readouterr().err
        return (tmp_path / out / "metrics.jsonl").read_text()

    (tmp_path / "valid.txt").write_text("Held out, for hashes of few texts hold out none. " * 9)
    held_out = ["--data", str(tmp_path / "valid.txt")] if name in ("mds-text", "webdataset") else []
    start = ["--data", str(ASSETS / name), *held_out, *SMALL.split(), *MODEL, "--packed", "--schedule", "constant"]
    whole = train("whole", *start, "--steps", "4")
    train("cut", *start, "--steps", "2")
    resumed = train("cut", "--resume", "--steps", "4")
    losses = [[line["loss"] for line in map(json.loads, text.splitlines()) if "loss" in line] for text in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert main(["eval", str(tmp_path / "whole"), "--cache", str(tmp_path / "cache"), "--context", "documents"]) == 0


def cut(folder: Path, name: str, count: int) -> None:
    file = folder / name
    file.write_bytes(file.read_bytes()[:-count])


def changed(folder: Path, name: str, place: int, content: bytes) -> None:
    data = bytearray((folder / name).read_bytes())
    data[place : place + len(content)] = content
    (folder / name).write_bytes(data)


IDS_FILE, INDEX = "int32_text_document.bin", "int32_text_document.idx"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("megatron", lambda f: cut(f, IDS_FILE, 4), f"{IDS_FILE} is damaged .* ids, but .*idx states"),
        ("megatron", lambda f: cut(f, IDS_FILE, 3), f"{IDS_FILE} is damaged .*of 4 each"),
        ("megatron", lambda f: cut(f, INDEX, 99), rf"{INDEX} is damaged .*it states \d+ seq"),
        ("megatron", lambda f: changed(f, INDEX, 0, b"X"), "idx is damaged .*does not begin as an index of"),
        ("megatron", lambda f: changed(f, INDEX, 9, b"\2"), "idx has version 2 and dtype 4, but must have"),
        ("megatron", lambda f: changed(f, INDEX, 34, b"\xff\xff"), "idx is damaged .*some sequence from 0 on"),
        ("megatron", lambda f: (f / IDS_FILE).unlink(), f"{INDEX} has no .* beside it"),
        ("mds-any", lambda f: (f / "index.json").unlink(), r"mds-any holds MDS without an index.json, which lists its shards"),
        ("mds-any", lambda f: (f / "shard.00001.mds").unlink(), r"Cannot read .*shard.00001.mds: No such file"),
        ("mds-any", lambda f: cut(f, "shard.00001.mds", 5), r"00001.mds is damaged or cut off \(sample \d+ has another size"),
        ("mds-any", lambda f: changed(f, "shard.00000.mds", 0, b"\xff\xff"), r"shard.00000.mds is damaged .*offsets do not"),
        ("mds-uint16-zstd", lambda f: cut(f, "shard.00000.mds.zstd", 5), r"shard.00000.mds.zstd is damaged or cut off"),
        ("mds-bytes", lambda f: None, r'mds, sample 1, has bytes in "tokens": choose another column, or say the dtype'),
        ("mds-text", lambda f: shutil.copy(ASSETS / "webdataset" / "000.tar", f), r"holds shards of two kinds, "),
        ("litdata", lambda f: cut(f, "chunk-0-1.bin", 5), r"chunk-0-1.bin is damaged or cut off \(sample \d+ has another"),
        ("litdata", lambda f: (f / "chunk-0-1.bin").unlink(), r"Cannot read .*chunk-0-1.bin: No such file"),
        ("webdataset", lambda f: cut(f, "001.tar", 1536), r"001.tar is damaged or cut off"),
    ],
)
def test_bad_shards_are_named_with_their_place_and_not_half_read(tmp_path: Path, name: str, change: Any, message: str) -> None:
    folder = tmp_path / name
    shutil.copytree(ASSETS / name, folder)
    change(folder)
    with pytest.raises(LineartimeError, match=message) as caught:
        stream_of(folder, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_headers_that_disagree_with_their_file_are_errors(tmp_path: Path) -> None:
    for content, message in (
        (llm_c(count=len(FLAT) + 1), r"a.bin is damaged .*of 2 each, and [\d,]+ ids are stated"),
        (llm_c(version=3), r"a.bin has version 3 of its format, but must have 1"),
        (SHORT, r"^data is .*a.bin, which holds no text .*; give `raw_ids` if they hold token ids alone"),
    ):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(LineartimeError, match=message):
            stream_of(tmp_path / "a.bin", tmp_path / "cache")
    for suffix in (".bin", ".idx"):
        shutil.copy(ASSETS / f"megatron/uint16_text_document{suffix}", tmp_path / f"pair{suffix}")
    content = bytearray((tmp_path / "pair.idx").read_bytes())
    lengths, places = np.frombuffer(content, "<i4", 2, 34), np.frombuffer(content, "<i8", 2, 34 + 4 * len(IDS))
    lengths[:2] += [len(IDS[1]) + 1, -len(IDS[1]) - 1]  # the second one is negative, and begins where the first one ends
    places[1] += 2 * (len(IDS[1]) + 1)
    (tmp_path / "pair.idx").write_bytes(content)
    with pytest.raises(LineartimeError, match=r"pair.idx is damaged .*some sequence from 0 on"):
        stream_of(tmp_path / "pair.bin", tmp_path / "cache")
    (tmp_path / "a.bin").write_bytes(SHORT[:-1])
    with pytest.raises(LineartimeError, match=r"a.bin is damaged or cut off \(its ids take [\d,]+ bytes, of 2 each\)"):
        stream_of(tmp_path / "a.bin", tmp_path / "cache", raw_ids="uint16")


def test_same_ids_have_one_digest_in_every_format_and_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    digests = {(text := stream_of(tmp_path / "a.txt", tmp_path / "cache")).digest}
    for kind in ("megatron", "nanogpt"):
        (tmp_path / kind).mkdir()
        file = write_shard(text, BYTES, tmp_path / kind, "train", kind)  # type: ignore[arg-type]
        digests.add(stream_of(file, tmp_path / "cache", **({} if kind == "megatron" else {"raw_ids": "uint16"})).digest)
    assert len(digests) == 1


def test_ids_beyond_the_vocabulary_are_named_with_their_place(tmp_path: Path) -> None:
    ids = np.full(9_000_000, 7, np.uint16)
    ids[8_999_990] = 300
    ids.tofile(tmp_path / "train.bin")
    ids[8_999_990], ids[5_000_000] = 7, 258
    ids.tofile(tmp_path / "later.bin")
    with pytest.raises(
        LineartimeError, match=r"train.bin has the id 300 at token 8,999,990, but the vocabulary has 258 tokens"
    ):
        stream_of(tmp_path / "train.bin", tmp_path, raw_ids="uint16")
    stream = stream_of(tmp_path / "later.bin", tmp_path, raw_ids="uint16")  # too many to look at all of them
    with pytest.raises(LineartimeError, match=r"later.bin has the id 258 at token 5,000,000, .*: give the tokenizer that made"):
        read_window(stream, 4_999_000, 2000)


def test_ids_and_text_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("text " * 999)
    shards = ASSETS / "megatron" / "int32_text_document"
    with pytest.raises(
        LineartimeError, match=r"int32_text_document.bin holds token ids, and other files of .* text: give files"
    ):
        token_stream(load_corpus([shards, tmp_path / "train.txt"]), "train", BYTES, tmp_path)


def test_ten_gigabytes_are_neither_read_nor_held_at_the_start(tmp_path: Path) -> None:
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(10 * 2**30)  # zeros that take no space
    (tmp_path / "val.bin").write_bytes(bytes(2**20))
    tracemalloc.start()
    stream = stream_of(tmp_path, tmp_path / "cache", "train", raw_ids="uint16")
    loader = CachedLoader(stream, BatchMaker(BYTES, "clm"), 4096, Rows(8, 8))
    loader.next_step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(stream) > 5 * 10**9
    assert peak < 60 * 2**20
    loader.close()


def test_the_command_writes_shards_with_their_tokenizer_that_are_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "Line {number} of many."}}\n' for number in range(200)))
    text, first, second, bare = (tmp_path / name for name in ("lines.jsonl", "first", "second", "bare"))
    for data, kind, tokenizer, out in (
        (text, "megatron", "bpe-300", first),
        (first, "megatron", str(first), second),
        (second, "nanogpt", str(first), bare),
    ):
        arguments = ["--data", str(data), "--format", kind, "--tokenizer", tokenizer, "--out", str(out)]
        assert main(["tokenize", *arguments]) == 0, capsys.readouterr().err
    tokenizer = read_tokenizer(first)
    for split in SPLITS:
        encoded = token_stream(load_corpus(text), split, tokenizer, tmp_path)
        found = token_stream(load_corpus(second), split, tokenizer, tmp_path)
        ids = read_window(found, 0, len(found))
        assert found.n_documents == encoded.n_documents
        assert unmarked(ids).tolist() == encoded.tokens[:].tolist()
        assert ((ids < 0) == (unmarked(ids) == tokenizer.end_of_document)).all()
        file = bare / ("val.bin" if split == "validation" else f"{split}.bin")
        assert np.fromfile(file, np.uint16).tolist() == encoded.tokens[:].tolist()
    assert main(["tokenize", "--format", "megatron", "--vocab-size", "300"]) == 1
    assert "--vocab-size is for a tokenizer alone: leave it out, and give `tokenizer`" in capsys.readouterr().err
    assert main(["tokenize", "--tokenizer", "bytes"]) == 1
    assert "--tokenizer is bytes, but one is trained: give a `format` for token ids" in capsys.readouterr().err


def test_documents_longer_than_a_block_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "PART", 7)
    tokens = np.array([*FLAT, 3, 4])
    file = write_shard(TokenStream("ids", tokens, 0), BYTES, tmp_path, "train", "megatron")
    assert documents(file, tmp_path) == [*([*ids, 256] for ids in IDS), [3, 4]]
