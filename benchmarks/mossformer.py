"""CPU time and memory of a layer of MossFormer, ours beside theirs: `python benchmarks/mossformer.py`, on one thread.

Needs FunASR (its file alone is read: `pip install --no-deps funasr`), einops and rotary-embedding-torch. Both layers have the
same weights, d = 512, and read one row without gradients, in turns; of the seven times of each, the median counts. Ten minutes
are 60,000 frames, at 100 frames a second, and a stream reads them a thousand at a time.
"""

# mypy: disable-error-code="import-untyped"
# ruff: noqa: E402

import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("src", "tests/assets")]

from make_mossformer import ScaleNorm, layer_class  # type: ignore[import-not-found]
from rotary_embedding_torch import RotaryEmbedding

from lineartime.foreign import MossFormerFLASH, from_mossformer

LENGTHS = (4096, 4000, 1000, 300)
WIDTH, MINUTES = 512, 10


def cpu_seconds(compute: Callable[[], object]) -> float:
    start = time.process_time()
    compute()
    return time.process_time() - start


def peak() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    kind = layer_class()
    print("| frames | causal | theirs, ms | ours, ms | ratio |\n|--:|---|--:|--:|--:|")
    for causal in (False, True):
        options = {"dim": WIDTH, "expansion_factor": 4.0, "causal": causal, "norm_klass": ScaleNorm}
        theirs = kind(**options, rotary_pos_emb=RotaryEmbedding(dim=32)).eval()
        ours = from_mossformer(theirs.state_dict(), causal=causal)
        for length in LENGTHS:
            x = torch.randn(1, length, WIDTH)
            times = [(cpu_seconds(lambda: theirs(x)), cpu_seconds(lambda: ours(x))) for _ in range(8)][1:]  # noqa: B023
            one, two = (statistics.median(own) * 1e3 for own in zip(*times, strict=True))
            print(f"| {length:,} | {causal} | {one:.0f} | {two:.0f} | {two / one:.2f} |", flush=True)
    layer = MossFormerFLASH(WIDTH, causal=True, convolution="causal").eval()
    _, state = layer.extend(torch.zeros(1, 1000, WIDTH))
    frames = 60 * 100 * MINUTES
    begin = peak()
    for _ in range(frames // 1000):
        _, state = layer.extend(torch.randn(1, 1000, WIDTH), state)
    streamed = peak()
    layer(torch.randn(1, frames, WIDTH))
    print(f"{frames:,} frames: a state of {state.nbytes / 2**20:.1f} MiB", end="; ")
    print(f"beyond {begin:.0f} MiB, the stream takes {streamed - begin:.0f} MiB, the whole sequence {peak() - begin:.0f} MiB")


if __name__ == "__main__":
    main()
