"""How much context models use: `python benchmarks/context_use.py runs/quick` (6 minutes a run on one core).

The loss by position of one evaluation compares different tokens, and few are near the start of a window. Here, every context
is measured on the same tokens, those of the test split: windows of 2n tokens start at every n-th token, and the last n tokens
of each count. So each of these tokens has from n + 1 to 2n tokens before it.
"""

import argparse
from pathlib import Path

from measure import save

from lineartime.checkpoint import load_with_tokenizer
from lineartime.data import load_corpus, token_stream
from lineartime.evaluation import evaluate
from lineartime.host import cache_folder
from lineartime.markdown import markdown_table

HALVES = (2, 4, 8, 16, 32, 64, 128, 256)
"""The lengths n of half a window."""
AT_ONCE = 8192
"""Tokens of windows computed at once."""


def losses(run: Path) -> list[float]:
    """The bits per byte of a run's model with each context."""
    found = []
    for n in HALVES:
        measured = evaluate(run, context_length=2 * n, stride=n, batch_size=AT_ONCE // (2 * n), precision="fp32")
        assert measured.bits_per_byte is not None
        found.append(measured.bits_per_byte)
        print(f"{run}: {n + 1} to {2 * n} tokens before: {found[-1]:.4f} bits per byte", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, trained on the default text")
    runs: list[Path] = parser.parse_args().runs
    found = [losses(run) for run in runs]
    stream = token_stream(load_corpus(()), "test", load_with_tokenizer(runs[0]).tokenizer, cache_folder())
    size = stream.n_bytes / len(stream)
    lines = [
        (f"{n + 1} to {2 * n}", f"{(n + 1) * size:.0f} to {2 * n * size:.0f}", *(f"{each:.3f}" for each in measured))
        for n, *measured in zip(HALVES, *found, strict=True)
    ]
    header = ("tokens before", "bytes before", *(f"`{run.name}`: bits per byte" for run in runs))
    rows = [{"run": run.name, "halves": HALVES, "bits_per_byte": each} for run, each in zip(runs, found, strict=True)]
    save("context_use", rows, markdown_table(header, lines, left=2))


if __name__ == "__main__":
    main()
