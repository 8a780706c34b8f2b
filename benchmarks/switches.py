"""Activations and normalisations of FLASH-Quad and FLASH, beyond the training length: `python benchmarks/switches.py`.

Each model is trained on windows of 512 tokens of the default text, and evaluated on windows of 512 and of 2,048 tokens. The
switches are those that Su Jianlin discusses for GAU and FLASH: the replacement of softmax, the divisor of the scores, and their
initial size. Takes about half an hour on 2 cores; an interrupted run resumes. With one seed, small differences mean nothing.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from measure import save

from lineartime.checkpoint import list_checkpoints, load_tokenizer
from lineartime.data import load_corpus, token_stream
from lineartime.evaluation import Evaluation, evaluate_windowed
from lineartime.host import cache_folder
from lineartime.markdown import markdown_table
from lineartime.models import presets
from lineartime.ops.activations import ACTIVATIONS
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

TRAINED, LONG = 512, 2048
SWITCHES = [
    ("flash-quad-tiny", "relu2", "count", "small"),
    ("flash-quad-tiny", "relu2", "count", "unit"),
    ("flash-quad-tiny", "relu2", "paper", "small"),
    ("flash-tiny", "relu2", "count", "small"),
    ("flash-tiny", "relu2", "count", "unit"),
    ("flash-tiny", "relu2", "paper", "small"),
    ("flash-tiny", "relu2", "paper_sum", "small"),
    ("flash-tiny", "laplace", "count", "unit"),
    ("flash-tiny", "softmax", "count", "unit"),
    ("flash-tiny", "softmax_plus", "count", "unit"),
]


def beyond(evaluation: Evaluation) -> float:
    """Bits per token for tokens with at least `TRAINED` tokens before them."""
    parts = [part for part in evaluation.by_position if part.first >= TRAINED]
    return sum(part.loss * part.count for part in parts) / sum(part.count for part in parts) / math.log(2)


def measure(config: TrainConfig) -> dict[str, float]:
    """Train, and evaluate on the test split in bits per byte; a token of this text is a byte."""
    result = train(config)
    tokenizer = load_tokenizer(result.checkpoint)
    stream = token_stream(load_corpus(None), "test", tokenizer, cache_folder())
    found = {}
    for length in (TRAINED, LONG):
        evaluation = evaluate_windowed(
            result.model, stream, tokenizer, context_length=length, stride=length, batch_size=4096 // length, bf16=True
        )
        assert evaluation.bits_per_byte is not None
        found[f"bits_per_byte_{length}"] = evaluation.bits_per_byte
        if length > TRAINED:
            found[f"bits_beyond_{TRAINED}"] = beyond(evaluation)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/switches"))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for preset, activation, normalization, initial_scores in SWITCHES:
        out = options.out / f"{preset}-{activation}-{normalization}-{initial_scores}"
        switches = {"activation": activation, "normalization": normalization, "initial_scores": initial_scores}
        changed: dict[str, Any] = dict(switches)
        if activation not in ACTIVATIONS:
            own = presets()[preset].mixer.options
            changed |= {"mixer": "flash-foreign", "d_qk": own["d_qk"], "chunk_size": own["chunk_size"]}
        config = TrainConfig(
            preset=preset,
            override=tuple(f"{name}={value}" for name, value in changed.items()),
            context_length=TRAINED,
            steps=options.steps,
            out=out,
            resume=bool(list_checkpoints(out)),
        )
        rows.append({"preset": preset, **switches, "steps": options.steps, **measure(config)})
        print(rows[-1], flush=True)
    header = ["preset", "activation", "`normalization`", "start", f"windows of {TRAINED}", f"windows of {LONG:,}"]
    header.append(f"tokens after {TRAINED} others")
    table = [
        [
            f"`{row['preset']}`",
            f"`{row['activation']}`",
            f"`{row['normalization']}`",
            row["initial_scores"],
            *(f"{row[name]:.3f}" for name in (f"bits_per_byte_{TRAINED}", f"bits_per_byte_{LONG}", f"bits_beyond_{TRAINED}")),
        ]
        for row in rows
    ]
    save("switches", rows, markdown_table(header, table))


if __name__ == "__main__":
    main()
