"""`lineartime seq2seq`: train an encoder-decoder on pairs of texts."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from lineartime.finetuning.pairs_config import PairsConfig


@dataclass(frozen=True)
class Seq2seqOptions(PairsConfig):
    """The options of `lineartime seq2seq`."""

    preset: Annotated[str, tyro.conf.arg(name="model", aliases=["--preset"])] = PairsConfig.preset

    def __post_init__(self) -> None:
        """Leave the checks to `PairsConfig`: tyro would show its errors as those of the parser."""


def run(options: Seq2seqOptions) -> None:
    """Train, and print the metrics of the best model."""
    config = PairsConfig(**vars(options))

    from lineartime.finetuning.seq2seq import seq2seq

    result = seq2seq(config)
    metrics = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in result.metrics.items())
    print(f"{options.out}: {metrics} after epoch {result.epoch:g}")
