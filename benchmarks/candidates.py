"""Further parts for flash-next, each alone, after the same steps: `python benchmarks/candidates.py` (25 minutes on a core).

The candidates are what linear attention has learnt since 2022: normalised queries and keys, a learned decay of the global
state, several heads in the global part, a short convolution; and a global part whose scores start near 1. They are written
here in plain PyTorch, which is slower than the layer itself, so that only losses after the same number of steps compare.
Normalised queries and keys are also tried in Transformer++.
Finished runs are not repeated; `--only NAME ...` runs some of them.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from measure import save
from torch import Tensor, nn

from lineartime.layers import FLASH, Attention
from lineartime.markdown import markdown_table
from lineartime.models import ModelConfig
from lineartime.models.language_model import LanguageModel, build_model
from lineartime.ops.batch import Batch
from lineartime.ops.mixed_chunk import attend_part
from lineartime.ops.mixed_chunk.inputs import Heads, queries_and_keys
from lineartime.runs.metrics import losses, read_metrics
from lineartime.training.config import TrainConfig
from lineartime.training.loop import train

STEPS, CONTEXT, BATCH = 150, 1024, 4
HEADS = 4
TAPS = 4


class Candidate(FLASH):
    """FLASH in plain PyTorch: the base of the candidates."""

    def begin(self) -> None:
        """Add the parameters of a candidate, and set initial values."""

    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        """As in FLASH, without its fused forms."""
        gate, v, z = F.silu(self.to_gate_value_base(normed)).split([self.d_gate, self.d_value, self.d_qk], -1)
        maps = self.changed(torch.stack(list(self.queries_and_keys(z, batch.rotations)), 1))
        out: Tensor = self.to_output(gate * self.attended(z, maps, v, batch))
        return out

    def changed(self, maps: Tensor) -> Tensor:
        """What becomes of queries and keys, [B, 4, T, s]."""
        return maps

    def attended(self, z: Tensor, maps: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """The local and the global part."""
        heads = Heads(*(*maps.unbind(1), v))
        local = attend_part("local", heads, self.chunk_bias(batch), batch, self.options)
        return local + self.from_earlier_chunks(z, heads, batch)

    def from_earlier_chunks(self, z: Tensor, heads: Heads, batch: Batch) -> Tensor:
        """The global part."""
        return attend_part("global", heads, None, batch, self.options)

    def summaries(self, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """K^T V / C of each chunk: [B, T, s] and [B, T, e] -> [B, G, s, e]."""
        return (batch.cut(k).mT @ batch.cut(v)).float() / self.chunk_size


class GlobalAwake(Candidate):
    """The scores of the global part start near 1, so that it starts as the mean of all values before the chunk."""

    def begin(self) -> None:
        nn.init.ones_(self.gamma[2:])
        nn.init.constant_(self.beta[2:], self.d_qk**-0.5)


class NormedMaps(Candidate):
    """Queries and keys are divided by their root mean square, and multiplied by a learned scale for each map."""

    def begin(self) -> None:
        start = [self.d_qk**-0.25] * 2 + [self.d_qk**-0.5] * 2  # as unit scores start, and as GlobalAwake
        self.scale = nn.Parameter(torch.tensor(start)[:, None, None])

    def changed(self, maps: Tensor) -> Tensor:
        return F.rms_norm(maps.float(), (self.d_qk,)) * self.scale


class Decayed(Candidate):
    """The global part is a mean over the chunks before, with weights that fall by a learned factor for each key feature."""

    def begin(self) -> None:
        self.keep = nn.Parameter(torch.linspace(0.0, 4.0, self.d_qk))  # factors from 0.5 to 0.98 for a chunk

    def from_earlier_chunks(self, z: Tensor, heads: Heads, batch: Batch) -> Tensor:
        made = self.summaries(heads.k_lin, heads.v, batch)
        place = torch.arange(batch.n_chunks, device=z.device)
        since = (place[:, None] - place - 1).clamp(min=0)[..., None]
        before = (place[:, None] > place)[..., None]
        weights = torch.sigmoid(self.keep) ** since * before  # [G, G, s]
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-6)
        read = torch.einsum("ghs,bhse->bgse", weights, made)
        return batch.join(batch.cut(heads.q_lin) @ read.to(heads.q_lin.dtype))


class SeveralHeads(Candidate):
    """The global part has heads of their own queries, keys and share of the values; its state is as large as before."""

    def begin(self) -> None:
        self.head_gamma = nn.Parameter(0.02 * torch.randn(2 * HEADS, self.d_qk))
        self.head_beta = nn.Parameter(torch.zeros(2 * HEADS, self.d_qk))

    def from_earlier_chunks(self, z: Tensor, heads: Heads, batch: Batch) -> Tensor:
        maps = queries_and_keys(z, self.head_gamma, self.head_beta, batch.rotations).unbind(1)
        parts = [
            attend_part("global", Heads(heads.q_quad, heads.k_quad, q, k, v), None, batch, self.options)
            for q, k, v in zip(maps[::2], maps[1::2], heads.v.chunk(HEADS, -1), strict=True)
        ]
        return torch.cat(parts, -1)


class Convolved(Candidate):
    """A causal convolution over the last tokens, one filter for each normed feature, is added before the projections."""

    def begin(self) -> None:
        self.filters = nn.Parameter(torch.zeros(self.d_model, 1, TAPS))

    def mix(self, normed: Tensor, batch: Batch) -> Tensor:
        before = F.pad(normed.mT, (TAPS - 1, 0))
        added = F.conv1d(before, self.filters.to(normed.dtype), groups=self.d_model).mT
        return super().mix(normed + added, batch)


class NormedAttention(Attention):
    """Softmax attention whose queries and keys are normalised in each head, with a learned scale for each feature."""

    def begin(self) -> None:
        """Add the scales."""
        self.scales = nn.Parameter(torch.ones(2, self.head_dim))

    def rotate(self, q: Tensor, k: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = (
            F.rms_norm(x.float(), (self.head_dim,), scale).to(x.dtype) for x, scale in zip((q, k), self.scales, strict=True)
        )
        return super().rotate(q, k, rotations)


CANDIDATES: dict[str, type[Candidate] | type[NormedAttention] | None] = {
    "flash-next": None,
    "flash-next, global scores start near 1": GlobalAwake,
    "flash-next, normalised queries and keys": NormedMaps,
    "flash-next, learned decay of the global state": Decayed,
    "flash-next, 4 heads in the global part": SeveralHeads,
    "flash-next, convolution of 4 tokens": Convolved,
    "transformer++": None,
    "transformer++, normalised queries and keys": NormedAttention,
}
"""Each with the system that it changes, before the comma."""


def building(candidate: type[Candidate] | type[NormedAttention] | None) -> Callable[[ModelConfig], LanguageModel]:
    """`build_model` for a candidate."""

    def build(config: ModelConfig) -> LanguageModel:
        model = build_model(config)
        for block in model.backbone.blocks:
            if candidate is not None:
                block.mixer.__class__ = candidate
                with torch.no_grad():
                    block.mixer.begin()  # type: ignore[operator]  # its class is a candidate now
        return model

    return build


def measure(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train, and read the loss on held-out text; a finished run is read."""
    run = options.out / f"{name}-{seed}".replace(" ", "-").replace(",", "")
    config = TrainConfig(
        preset=f"{name.partition(',')[0]}-tiny",
        data=tuple(options.data),
        tokenizer="bpe-4096",
        context_length=CONTEXT,
        batch_size=BATCH,
        steps=options.steps,
        optimizer="muon",
        adamw_ratio=2.0,
        learning_rate=options.rate,
        seed=seed,
        eval_every=options.steps,
        eval_windows=64,
        track=(),
        compile="off",
        threads=options.threads,
        out=run,
    )
    if not run.exists():
        with mock.patch("lineartime.training.setup.build_model", building(CANDIDATES[name])):
            train(config)
    lines = read_metrics(run)
    found = losses(lines, "validation_loss")[options.steps]
    row = {"candidate": name, "seed": seed, "nats_per_token": found, "steps": options.steps, "rate": options.rate}
    print(row, flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The losses, and their differences from the system itself with the same seed."""
    base = {(row["candidate"], row["seed"]): row["nats_per_token"] for row in rows}
    lines = []
    for name in dict.fromkeys(row["candidate"] for row in rows):
        own = [row for row in rows if row["candidate"] == name]
        found = " / ".join(f"{row['nats_per_token']:.3f}" for row in own)
        system = name.partition(",")[0]
        change = " / ".join(f"{row['nats_per_token'] / base.get((system, row['seed']), math.nan) - 1:+.1%}" for row in own)
        lines.append([name, found, change])
    return markdown_table(["tiny model", "held-out nats per token", "change"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/candidates"))
    parser.add_argument("--only", nargs="*", default=list(CANDIDATES), help="candidates to run; all by default")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--data", nargs="*", default=[], help="text, as for training; the source of Python by default")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    rows = [measure(name, seed, options) for seed in options.seeds for name in options.only]
    save("candidates", rows, table(rows))


if __name__ == "__main__":
    main()
