"""The figures in docs/data.md: `python benchmarks/data.py` (some minutes on 2 cores, and temporarily 7 GB of disk).

The text consists of random words whose frequencies fall as 1 / rank, as in real text. The measurements are:

    read      tokens per second from the loader of encoded text, on one core
    encode    tokens and bytes per second into the cache, on all cores
    memory    the peak memory of a process that encodes or streams a small file and a large one
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import save

from lineartime.data import (
    BatchMaker,
    ByteTokenizer,
    CachedLoader,
    Rows,
    StreamingLoader,
    Tokenizer,
    load_corpus,
    read_tokenizer,
    token_stream,
    train_tokenizer,
)
from lineartime.markdown import markdown_table

CONTEXT = 512


def make_text(file: Path, size: int) -> None:
    """Write JSON lines of about `size` bytes, in documents of about 2,000 bytes."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(random.choice(letters[:20], random.integers(1, 11))) for _ in range(50_000)]
    weights = 1 / np.arange(1, len(words) + 1)
    weights /= weights.sum()
    documents = []
    for _ in range(2000):
        chosen = random.choice(len(words), 350, p=weights)
        documents.append(json.dumps({"text": " ".join(words[i] for i in chosen) + ".\n"}) + "\n")
    block = "".join(documents)
    with file.open("w") as stream:
        for _ in range(max(1, round(size / len(block)))):
            stream.write(block)


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    return ByteTokenizer() if name == "bytes" else read_tokenizer(folder / "tokenizer.json")


def encode(file: Path, folder: Path, name: str) -> dict[str, Any]:
    """Encode a file that is not in the cache."""
    start = time.perf_counter()
    stream = token_stream(load_corpus(file), "train", tokenizer_of(name, folder), folder / f"cache-{name}")
    return {"tokens": len(stream), "bytes": stream.n_bytes, "seconds": time.perf_counter() - start}


def read(file: Path, folder: Path, name: str, task: Any, packed: bool, cold: bool) -> dict[str, Any]:
    """Read a file that is in the cache; if `cold`, evict it from the page cache of the operating system first."""
    if cold:
        for shard in folder.glob(f"cache-{name}/*/tokens-*.bin"):
            with shard.open("rb") as raw:
                os.fsync(raw.fileno())
                os.posix_fadvise(raw.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tokenizer = tokenizer_of(name, folder)
    stream = token_stream(load_corpus(file), "train", tokenizer, folder / f"cache-{name}")
    rows = Rows(64, 16)
    loader = CachedLoader(stream, BatchMaker(tokenizer, task, packed=packed), CONTEXT, rows)
    loader.next_step()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < 3:
        loader.next_step()
        steps += 1
    return {"tokens": steps * rows.per_step * CONTEXT, "seconds": time.perf_counter() - start}


def stream(file: Path, folder: Path, name: str) -> dict[str, Any]:
    """Stream the training split of a file once, in one lane."""
    rows = Rows(64, 16)
    loader = StreamingLoader(load_corpus(file), BatchMaker(tokenizer_of(name, folder), "clm"), CONTEXT, rows, lanes=1)
    start, tokens = time.perf_counter(), 0
    while loader.state()["lanes"]["0"]["epoch"] == 0:
        loader.next_step()
        tokens += rows.per_step * CONTEXT
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {"encode": encode, "read": read, "stream": stream}


def measured(job: str, *arguments: Any) -> dict[str, Any]:
    """Run a job in a separate process, and return its results and its peak memory in MB."""
    command = [sys.executable, __file__, "--job", json.dumps([job, *map(str, arguments[:2]), *arguments[2:]])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def run_job(description: str) -> None:
    name, file, folder, *rest = json.loads(description)
    result = JOBS[name](Path(file), Path(folder), *rest)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({**result, "peak_mb": int(peak[1]) / 1000 if peak else None}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=20, help="size of the small file in MB")
    parser.add_argument("--large", type=int, default=2000, help="size of the large file in MB")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_job(arguments.job)
        return
    rows: list[dict[str, Any]] = []

    def add(what: str, megabytes: int, result: dict[str, Any]) -> None:
        rows.append({"what": what, "file_mb": megabytes, **result})
        print(rows[-1], flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {size: folder / f"{size}.jsonl" for size in (arguments.small, arguments.large)}
        for size, file in files.items():
            make_text(file, size * 1_000_000)
        tokenizer = train_tokenizer(load_corpus(files[arguments.small]), "bpe", 32_000)
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        for size, file in files.items():
            add("encode, bytes", size, measured("encode", file, folder, "bytes"))
            add("stream, bytes", size, measured("stream", file, folder, "bytes"))
        add("encode, BPE", arguments.small, measured("encode", files[arguments.small], folder, "bpe"))
        cases = (
            ("windows from disk", "clm", False, True),
            ("windows", "clm", False, False),
            ("packed", "clm", True, False),
            ("masked", "mlm", False, False),
        )
        for label, *options in cases:  # the small file fits into memory
            size = arguments.large if options[-1] else arguments.small
            add(f"read, {label}", size, measured("read", files[size], folder, "bytes", *options))
    header = ["", "file (MB)", "million tokens/s", "MB of text/s", "peak memory (MB)"]
    lines = []
    for row in rows:
        speed = row["tokens"] / row["seconds"] / 1e6
        text = f"{row['bytes'] / row['seconds'] / 1e6:.1f}" if "bytes" in row else ""
        # Pages of a memory-mapped file count as memory, but the system reclaims them.
        peak = "" if row["what"].startswith("read") else f"{row['peak_mb']:,.0f}"
        lines.append([row["what"], f"{row['file_mb']:,}", f"{speed:.2f}", text, peak])
    save("data", rows, markdown_table(header, lines))


if __name__ == "__main__":
    main()
