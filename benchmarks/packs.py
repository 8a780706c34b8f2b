"""The cost of packs of documents of different lengths: `python benchmarks/packs.py --label after` (about two minutes).

A step is a forward and a backward pass of one mixer over one pack, on one thread. Times are CPU times, which other
load does not lengthen. Memory is the peak above what the process held before the step. A run with another label, for instance
of an earlier commit through PYTHONPATH, adds a column to the same table. "alone" is the time of the same documents one after
the other, without a pack.
"""

import argparse
import ctypes
import gc
import json
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, save

from lineartime.layers.mixer import Mixer
from lineartime.layers.options import constructor_options
from lineartime.markdown import markdown_table
from lineartime.models.layer_config import KINDS

D_MODEL = 64
SMALL = {"d_qk": 32, "n_heads": 2, "max_length": None}
MIXERS = ("gau", "attention", "flash", "flash-weighted", "flash-first-to-all", "mixed-chunk", "linear-elu", "reformer")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def packs() -> dict[str, list[int]]:
    """The document lengths of each pack, in total 512 to 1,080 tokens."""
    draw = random.Random(0)
    return {
        "one long": [2] * 127 + [258],
        "even": [64] * 16,
        "nearly even": [draw.randint(48, 80) for _ in range(16)],
        "log-normal": [1 + int(draw.lognormvariate(3, 1.5)) for _ in range(24)],
    }


def build(name: str) -> Mixer:
    mixer = KINDS["mixer"][name]
    options = {option: value for option, value in SMALL.items() if option in constructor_options(mixer)}
    if name not in ("gau", "gau-multi-head"):
        options.pop("max_length", None)
    torch.manual_seed(0)
    built: Mixer = mixer(D_MODEL, causal=mixer.why_not_causal is None, **options)
    return built


def held() -> int:
    """The peak memory of this process in bytes, since it was last reset."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return 1024 * int(lines["VmHWM"].split()[0])


def step(mixer: Mixer, x: torch.Tensor, *rest: Any) -> float:
    start = time.process_time()
    mixer(x, *rest).square().sum().backward()
    return time.process_time() - start


def measure(mixer: Mixer, lengths: list[int], repeat: int) -> dict[str, float]:
    ends = torch.tensor([0, *accumulate(lengths)])
    x = torch.randn(1, sum(lengths), D_MODEL)
    step(mixer, x, None, ends)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free what the previous step left
    _CLEAR.write_text("5")
    before = held()
    times = [step(mixer, x, None, ends)]
    peak = held() - before
    while len(times) < repeat and sum(times) < 0.5:
        times.append(step(mixer, x, None, ends))
    return {"seconds": min(times), "peak_bytes": peak}


def alone(mixer: Mixer, lengths: list[int]) -> float:
    documents = [torch.randn(1, tokens, D_MODEL) for tokens in lengths]
    return sum(step(mixer, document) for document in documents)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", default="after", help="the column of this run")
    parser.add_argument("--extreme", action="store_true", help="measure 2,999 documents of a token and one of 3,001 instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = {"2,999 and one long": [1] * 2999 + [3001]} if arguments.extreme else packs()
    path = RESULTS / "packs.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if row["label"] != arguments.label or row["pack"] not in cases]
    for pack, lengths in cases.items():
        for name in MIXERS:
            mixer = build(name)
            found = measure(mixer, lengths, 1 if arguments.extreme else 15)
            row = {
                "label": arguments.label,
                "pack": pack,
                "mixer": name,
                "documents": len(lengths),
                "tokens": sum(lengths),
                **found,
            }
            if not arguments.extreme:
                row["alone_seconds"] = alone(mixer, lengths)
            rows.append(row)
            print(row, flush=True)
    labels = sorted({row["label"] for row in rows}, reverse=True)
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells = table.setdefault((row["pack"], row["mixer"]), {})
        cells[row["label"]] = f"{1000 * row['seconds']:,.1f} ms, {row['peak_bytes'] / 2**20:,.0f} MiB"
        if "alone_seconds" in row:
            cells["alone"] = f"{1000 * row['alone_seconds']:,.1f} ms"
    header = ["pack", "mixer", *labels, "alone"]
    save(
        "packs",
        rows,
        markdown_table(header, [[*key, *(cells.get(name, "-") for name in header[2:])] for key, cells in table.items()]),
    )


if __name__ == "__main__":
    main()
