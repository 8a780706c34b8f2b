"""How much the loss of trained models falls with a longer context: `python benchmarks/context.py RUN ...` (minutes on 2 cores).

Every token of the test split is predicted within windows that overlap by half: with windows of N tokens, N / 2 to N - 1 tokens
precede it, except in the first window. Two lengths are compared on the same tokens, in blocks of the longest window: their
difference is known far better than either loss.
"""

import argparse
from pathlib import Path

import torch
from measure import save
from torch import Tensor

from lineartime.evaluation import evaluate
from lineartime.evaluation.perplexity import mean_over_rows
from lineartime.markdown import markdown_table

LENGTHS = [128, 512, 1024, 2048, 4096]


def in_blocks(samples: Tensor, size: int) -> Tensor:
    """The sums of samples [n, 2], a loss and its tokens, over blocks of `size` tokens."""
    block = (samples[:, 1].cumsum(0) - 1).long() // size
    return torch.zeros(int(block[-1]) + 1, 2, dtype=samples.dtype).index_add_(0, block, samples)


def row(run: Path, precision: str, max_tokens: int | None) -> list[str]:
    """A line of the table: the losses of a run by the length of the windows."""
    found, first, cells = {}, None, []
    for length in LENGTHS:
        result = evaluate(
            run, context_length=length, stride=length // 2, max_tokens=max_tokens, batch_size=max(1, 8192 // length),
            precision=precision,  # type: ignore[arg-type]
        )  # fmt: skip
        found[length] = in_blocks(result.samples, LENGTHS[-1])
        first = found[512] if length == 512 else first
        cells.append(f"{result.loss:.4f}")
    assert first is not None
    for length in LENGTHS[2:]:
        fall = mean_over_rows(found[length][:, 0] - first[:, 0], first[:, 1])
        assert fall is not None
        cells.append(f"{fall.loss:+.4f} ± {fall.error or 0:.4f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--names", nargs="+", help="their names in the table; the default is those of their folders")
    parser.add_argument("--max-tokens", type=int, help="measure only so many tokens; the default is the whole test split")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", default="context", help="the name of its files in benchmarks/results; the default is context")
    given = parser.parse_args()
    header = ["run", *(f"{length:,} tokens" for length in LENGTHS), *(f"{length:,} - 512" for length in LENGTHS[2:])]
    names = given.names or [run.name for run in given.runs]
    rows = [[name, *row(run, given.precision, given.max_tokens)] for name, run in zip(names, given.runs, strict=True)]
    save(given.out, [dict(zip(header, each, strict=True)) for each in rows], markdown_table(header, rows))


if __name__ == "__main__":
    main()
