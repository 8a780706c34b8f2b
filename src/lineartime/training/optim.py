"""The optimiser and its learning rate."""

import torch
from torch import nn

from lineartime.training.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices alone: the weights of linear maps and embeddings."""
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if id(p) in matrices], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up to the peak, then a linear fall that reaches zero just after the last step (step counts from 0)."""
    warmup = config.steps // 10 if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (config.steps - step) / max(1, config.steps - warmup)
