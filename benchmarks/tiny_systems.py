"""The tiny presets, trained alike: `python benchmarks/tiny_systems.py` (about 20 minutes on 2 cores).

Each reads the same batches of the default text for as many steps as `make train`, and is measured on its test split.
"""

import argparse
from pathlib import Path
from typing import Any

from measure import markdown, save

from lineartime.checkpoint import list_checkpoints, load_tokenizer
from lineartime.data import default_cache, load_corpus, token_stream
from lineartime.evaluation import windowed
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

PRESETS = ["flash-next-tiny", "flash-tiny", "flash-quad-tiny", "transformer++-tiny"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny_systems"))
    out = parser.parse_args().out
    rows: list[dict[str, Any]] = []
    for preset in PRESETS:
        config = TrainConfig(preset=preset, out=out / preset, resume=bool(list_checkpoints(out / preset)))
        result = train(config)
        model, tokenizer = result.model, load_tokenizer(result.checkpoint)
        stream = token_stream(load_corpus(None), "test", tokenizer, default_cache())
        length = config.context_length
        evaluation = windowed(model, stream, tokenizer, context_length=length, stride=length, batch_size=8, bf16=True)
        tokens = config.steps * config.batch_size * length
        rows.append(
            {
                "preset": preset,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "training_tokens": tokens,
                "test_bits_per_byte": evaluation.bits_per_byte,
            }
        )
        print(rows[-1], flush=True)
    header = ["preset", "parameters", "training tokens", "test bits per byte"]
    table = [
        [
            f"`{row['preset']}`",
            f"{row['parameters'] / 1e6:.1f} M",
            f"{row['training_tokens'] / 1e6:.1f} M",
            f"{row['test_bits_per_byte']:.3f}",
        ]
        for row in rows
    ]
    save("tiny_systems", rows, markdown(header, table))


if __name__ == "__main__":
    main()
