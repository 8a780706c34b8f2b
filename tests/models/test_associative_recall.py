"""What every system can learn: to recall the value that came with a key, 64 tokens of which the first 8 are the pairs.

    8 pairs, each one token that stands for a key and a value, then 56 of their keys in any order, whose values are asked

No value is shown after the pairs, so that a system that does not reach them can only guess. Accuracy is measured on the last
20 tokens, which no chunk, window or stride holds together with the pairs. Pairs stand in any order and keys get any value,
anew in every sequence: there is nothing to memorise.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineartime.models import ModelConfig, build_model
from lineartime.models.systems import SYSTEMS, Size

PAIRS, LENGTH, KEYS, VALUES, MEASURED = 8, 64, 8, 8, 20
SIZE = Size(d_model=64, gated_blocks=2, attention_blocks=2, n_heads=2, d_qk=32, chunk_size=16, vocab_size=KEYS + KEYS * VALUES)
MECHANISMS = {row.mixer: system for system, row in reversed(SYSTEMS.items())}.values()
"""A system for each mechanism: others differ from these in options, size or what surrounds attention."""
STEPS, BATCH, PEAK, WARM_UP, STEADY = 300, 16, 4e-3, 20, 210

LEARNED = 0.9
"""The accuracy that a system has to reach; most end above 0.99."""

CANNOT = {
    "combiner",  # with chunks of 16, a column's summary was made for another query than the one that asks
    "combiner-fixed",  # one summary of eight pairs cannot say which value belongs to which key
    "flash-local",  # it reads nothing beyond its chunk
}

# What a system needs to have a chance at this length and width.
ADAPTED: dict[str, dict[str, int]] = {
    "flash-global": {"chunk_size": 16},  # a chunk reads nothing of itself: the one with the pairs has to be short
    "flash-first-to-all": {"d_qk": 32, "chunk_size": 16},  # fine-tuning sizes are others; those of the rest are enough
    "flash-cls": {"d_qk": 32, "chunk_size": 16},
    "gau-multi-head": {"n_heads": 2},  # four heads of 8 are too narrow
    "linformer": {"n_landmarks": 16},
    "sparse": {"stride": 36},  # two blocks take two steps, and the measured tokens are two steps from the pairs
    "longformer": {"n_global": 8},  # the pairs: a window of 16 loses them
    "reformer": {"n_buckets": 2, "chunk_size": 16},
}


def small(system: str) -> ModelConfig:
    """The system, causal if it can be, without a sinusoid, which would drown embeddings that are as small as at first."""
    row = SYSTEMS[system]
    config = row.model(SIZE, "clm" if row.mixer.why_not_causal is None else "mlm")
    if config.absolute_position == "scaled_sin":
        config = config.override(absolute_position="none")
    return config.override(**ADAPTED.get(system, {}))


def awake(model: nn.Module) -> None:
    """Start at the gain that N(0, 0.02) gives at the paper's width: at a width of 64, attention would sleep for long."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(1.0)
            elif name.endswith("beta"):  # so that q.k / sqrt(s) starts near 1, and relu^2 passes a gradient
                parameter.fill_(parameter.shape[-1] ** -0.25)
            elif parameter.dim() > 1:
                parameter.mul_(4.0)


def draw(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids [B, T], and the value to recall at each of the last `MEASURED` tokens and before: [B, T - pairs]."""
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)
    values = torch.randint(VALUES, (batch, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (batch, LENGTH - PAIRS), generator=generator)
    return torch.cat([KEYS + keys * VALUES + values, keys.gather(1, asked)], 1), values.gather(1, asked)


def answers(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits of the values [B, T - pairs, values]."""
    logits: Tensor = model(ids)
    return logits[:, PAIRS:, :VALUES]


def accuracy(logits: Tensor, values: Tensor) -> float:
    return (logits.argmax(-1) == values)[:, -MEASURED:].float().mean().item()


def recall_after_training(config: ModelConfig) -> float:
    """The accuracy on new sequences, after at most `STEPS` steps."""
    model = build_model(config)
    awake(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - STEADY), 1.0)
    )
    generator = torch.Generator().manual_seed(1)
    recent: list[float] = []
    for _ in range(STEPS):
        ids, values = draw(BATCH, generator)
        logits = answers(model, ids)
        F.cross_entropy(logits.flatten(0, 1), values.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        recent = [*recent[-4:], accuracy(logits, values)]
        if min(recent) > 0.95:  # learned: no need to go on
            break
    with torch.no_grad():
        ids, values = draw(128, torch.Generator().manual_seed(2))
        return accuracy(answers(model, ids), values)


@pytest.mark.nightly
@pytest.mark.parametrize("system", sorted({*MECHANISMS} - CANNOT))
def test_system_that_reaches_the_pairs_learns_to_recall_them(system: str) -> None:
    assert recall_after_training(small(system)) > LEARNED
