"""FLASH-pytorch as a subject of the benchmarks, at the sizes of one of our models.

It shifts tokens, rotates only part of the features, does not tie the output embedding, and has no streams.
"""

import warnings
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.bench.measure import Subject
from lineartime.machine import shapes_only
from lineartime.models.config import ModelConfig
from lineartime.models.cost import forward_flops

NAME = "flash-pytorch"
MISSING = "" if find_spec("flash_pytorch") else "FLASH-pytorch is not installed: pip install 'lineartime[peers]'"


class FlashPytorch(nn.Module):
    """Its model, with the methods of ours that a benchmark calls."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.mixer.options
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own code
            from flash_pytorch import FLASHTransformer

            self.model = FLASHTransformer(
                dim=config.d_model,
                num_tokens=config.vocab_size,
                depth=config.n_blocks,
                group_size=sizes["chunk_size"],
                query_key_dim=sizes["d_qk"],
                expansion_factor=float(sizes["expansion"]),
                causal=config.task == "clm",
                norm_type="layernorm" if config.norm == "layernorm" else "scalenorm",
            )

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids)
        return logits

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(ids).float().flatten(0, 1), targets.flatten())

    def compile_blocks(self) -> None:
        self.compile()


class Peer(Subject):
    """Built in place of the model whose sizes it has."""

    def build(self) -> Any:
        return FlashPytorch(self.config)

    def forward_flops(self, length: int) -> float:
        """FLOPs of a token in a forward pass over so many."""
        with warnings.catch_warnings(), shapes_only():
            warnings.simplefilter("ignore")
            return forward_flops(self.build(), torch.zeros(1, length, dtype=torch.long))["Global"] / length
