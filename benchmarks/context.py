"""Training on a document of a million tokens, split over processes: `python benchmarks/context.py` (10 minutes on 2 cores).

The script times training steps (loss, gradients, AdamW) on the 2^20 bytes of one document, with 1, 2 and 4 processes of one
thread each, which communicate by gloo on this machine. All start from the same parameters, so their losses must agree. Blocks
are recomputed in the backward pass. Memory is the peak of a process (VmHWM), including PyTorch and the optimiser.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import save
from torch import Tensor

from lineartime.markdown import markdown_table
from lineartime.models import LayerConfig, ModelConfig, build_model
from lineartime.ops.context import context_group

TOKENS = 2**20
STEPS = 3
MIXER = LayerConfig("flash", d_qk=16, expansion=1, chunk_size=256)
MODEL = ModelConfig("clm", vocab_size=256, d_model=32, n_blocks=4, mixer=MIXER)
SIZES = (1, 2, 4)


def document() -> Tensor:
    """A text with a pattern to learn, [1, TOKENS + 1]."""
    text, i = bytearray(), 0
    while len(text) <= TOKENS:
        text += f"the square of {i} is {i * i}, and so on.\n".encode()
        i += 1
    return torch.tensor(list(text[: TOKENS + 1]))[None]


def train(rank: int, size: int) -> dict[str, Any]:
    """The losses, times and peak memory of one process over a few steps."""
    torch.manual_seed(0)
    model = build_model(MODEL)
    model.recompute_blocks()
    everyone = dist.group.WORLD
    context = context_group(everyone) if everyone is not None and size > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = document()
    ids, targets = (x.chunk(size, 1)[rank] for x in (tokens[:, :-1], tokens[:, 1:]))
    losses, seconds = [], []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        loss = model.total_loss(ids, targets, context=context) / TOKENS
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        for x in (loss, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"losses": losses, "seconds": seconds, "peak_bytes": 1024 * int(status["VmHWM"].split()[0])}


def process(rank: int, size: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    limit = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    print(json.dumps(train(rank, size)))
    dist.destroy_process_group()


def run(size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--size", str(size), "--store", f"{folder}/store", "--rank"]
        started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
        outputs = [json.loads(one.communicate()[0]) for one in started]
    state_bytes = 4 * MIXER.options["d_qk"] * MIXER.options["expansion"] * MODEL.d_model
    return {
        "processes": size,
        "tokens": TOKENS,
        "losses": outputs[0]["losses"],
        "seconds": [max(times) for times in zip(*(output["seconds"] for output in outputs), strict=True)],
        "peak_bytes": [output["peak_bytes"] for output in outputs],
        # One state for every other process: in the forward pass, in the recomputation of the block, and as a gradient.
        "bytes_sent_per_layer": 3 * (size - 1) * state_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        process(arguments.rank, arguments.size, arguments.store)
        return
    rows = []
    for size in SIZES:
        rows.append(run(size))
        print(rows[-1], flush=True)
    alone = rows[0]["losses"]
    for row in rows:
        row["loss_difference"] = max(abs(a - b) / b for a, b in zip(row["losses"], alone, strict=True))
        assert row["loss_difference"] < 1e-5, row
    header = ["processes", "seconds, fastest step", "peak memory of a process", "sent per layer and step", "loss, last step"]
    table = [
        [
            str(row["processes"]),
            f"{min(row['seconds']):.1f}",
            f"{max(row['peak_bytes']) / 2**30:.2f} GiB",
            f"{row['bytes_sent_per_layer'] / 1024:.0f} KiB",
            f"{row['losses'][-1]:.6f}",
        ]
        for row in rows
    ]
    save("context", rows, markdown_table(header, table))


if __name__ == "__main__":
    main()
