"""Train the tiny presets under equal conditions: `python benchmarks/tiny_systems.py` (about 25 minutes on 2 cores).

Each one reads the same batches of the default text for 600 steps, and is evaluated on its test split. `--only NAME ...` trains
some of them and keeps the results of the others.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from measure import RESULTS, save

from lineartime.checkpoint import list_checkpoints, load_tokenizer
from lineartime.data import load_corpus, token_stream
from lineartime.evaluation import evaluate_windowed
from lineartime.host import cache_folder
from lineartime.markdown import markdown_table
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "`flash-next-tiny`": ("flash-next-tiny", ()),
    "`flash-tiny`": ("flash-tiny", ()),
    "`flash-quad-tiny`": ("flash-quad-tiny", ()),
    "`flash-quad-tiny`, the published divisor": (
        "flash-quad-tiny",
        ("normalization=paper", "initial_scores=small", "max_length=512"),
    ),
    "`transformer++-tiny`": ("transformer++-tiny", ()),
}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train a model, or read its finished run, and evaluate it on the test split."""
    preset, override = MODELS[name]
    out = folder / "-".join([preset, *(item.partition("=")[2] for item in override)])
    result = train(TrainConfig(preset=preset, override=override, out=out, resume=bool(list_checkpoints(out))))
    config, tokenizer = TrainConfig(), load_tokenizer(result.checkpoint)
    stream = token_stream(load_corpus(None), "test", tokenizer, cache_folder())
    length = config.context_length
    evaluation = evaluate_windowed(
        result.model, stream, tokenizer, context_length=length, stride=length, batch_size=8, bf16=True
    )
    row = {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "training_tokens": config.steps * config.batch_size * length,
        "test_bits_per_byte": evaluation.bits_per_byte,
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny_systems"))
    parser.add_argument("--only", nargs="*", default=list(MODELS))
    options = parser.parse_args()
    kept = {row["model"]: row for row in json.loads((RESULTS / "tiny_systems.json").read_text())["rows"]}
    rows = [measure(name, options.out) if name in options.only else kept[name] for name in MODELS]
    header = ["model", "parameters", "training tokens", "test bits per byte"]
    table = [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['training_tokens'] / 1e6:.1f} M",
            f"{row['test_bits_per_byte']:.3f}",
        ]
        for row in rows
    ]
    save("tiny_systems", rows, markdown_table(header, table))


if __name__ == "__main__":
    main()
