"""Compare training, packs and single steps of `extend` of two checkouts: `python benchmarks/compare.py OLD NEW` (6 minutes).

Each checkout runs in its own process. The processes take turns step by step, so that other load on the machine affects both.
The results are medians, and the median of the ratios of neighbouring steps, for wall-clock time and for the CPU time of the
process, which other load disturbs less.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import save

from lineartime.markdown import markdown_table

CASES = [
    {"case": case, "preset": preset, "length": 1024, "batch": 2, "dtype": dtype}
    for preset in ("flash-tiny", "flash-quad-tiny", "transformer++-tiny")
    for case, dtype in (("train", "fp32"), ("train", "bf16"), ("train packed", "fp32"), ("extend", "fp32"))
]

# The script of each process, which takes a step for every line that it reads. It uses only names that both checkouts have.
STEPS = r"""
import json, sys, time
checkout, case = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, checkout + "/src")
import torch
import lineartime
assert lineartime.__file__.startswith(checkout), lineartime.__file__
torch.manual_seed(0)
model = lineartime.build(case["preset"], vocab_size=258)
packed, length = case["case"] == "train packed", case["length"]
shape = (1, length * case["batch"]) if packed else (case["batch"], length)
ids, targets = torch.randint(0, 258, shape), torch.randint(0, 258, shape)
ends = torch.arange(0, shape[1] + 1, 256) if packed else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

def train():
    with torch.autocast("cpu", torch.bfloat16, enabled=case["dtype"] == "bf16"):
        loss = model.loss(ids, targets, cu_seqlens=ends)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

@torch.no_grad()
def extend():
    global state
    for _ in range(8):
        logits, state = model.extend(ids[:, :1], state)

if case["case"] == "extend":
    with torch.no_grad():
        _, state = model.eval().extend(ids, model.init_state(case["batch"]))
step = extend if case["case"] == "extend" else train
for _ in sys.stdin:
    wall, processor = time.perf_counter(), time.process_time()
    step()
    print(time.perf_counter() - wall, time.process_time() - processor, flush=True)
"""


def compare(old: Path, new: Path, case: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Seconds per step of both checkouts, and their ratios."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STEPS, str(path.resolve()), json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in (old, new)
    ]
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(repeats + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            process = processes[which]
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("step\n")
            process.stdin.flush()
            wall, processor = map(float, process.stdout.readline().split())
            if turn >= 2:  # the first ones warm up
                times[which].append((wall, processor))
    for process in processes:
        process.kill()
        process.wait()
    result: dict[str, Any] = {**case, "repeats": repeats}
    for index, clock in enumerate(("wall", "processor")):
        before, after = ([step[index] for step in steps] for steps in times)
        result[clock] = {
            "old": statistics.median(before),
            "new": statistics.median(after),
            "new / old": statistics.median(y / x for x, y in zip(before, after, strict=True)),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--name", default="compare", help="of the files in benchmarks/results")
    options = parser.parse_args()
    results = []
    for case in CASES:
        results.append(compare(options.old, options.new, case, options.repeats))
        print(json.dumps(results[-1]), flush=True)
    rows = []
    for r in results:
        wall = [f"{r['wall'][key]:.3f}" for key in ("old", "new", "new / old")]
        rows.append([r["case"], f"`{r['preset']}`", r["dtype"], *wall, f"{r['processor']['new / old']:.3f}"])
    header = ["case", "preset", "precision", "old, s", "new, s", "new / old", "new / old, processor time"]
    save(options.name, results, markdown_table(header, rows))


if __name__ == "__main__":
    main()
