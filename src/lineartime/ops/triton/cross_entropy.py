"""Cross-entropy on the GPU, with its gradient in place of the logits: each logit is read twice and written once.

Shapes: n tokens, V vocabulary.

    loss[t] = logsumexp(x[t]) - x[t, target[t]]        dx[t] = softmax(x[t]) - one_hot(target[t])        0 for an ignored target
"""

# Triton may be absent, has no types, and writes the constants of a kernel in capitals.
# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"
# ruff: noqa: N803

import torch
import triton.language as tl
from torch import Tensor

from lineartime.ops.triton import workspace
from lineartime.ops.triton.common import INTERPRETED, jit, on_device


@jit
def cross_entropy_kernel(
    logits, targets, losses, V,
    IGNORED: tl.constexpr, KEEP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of one token; if KEEP, its logits are overwritten with their gradient. One program computes one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    # Before the maximum: it is a barrier, after which another thread may have overwritten this logit. Outside the vocabulary
    # is NaN.
    chosen = tl.load(logits + target, mask=(target >= 0) & (target < V), other=float("nan")).to(ACC)

    peak = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tile = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(ACC)
        higher = tl.maximum(peak, tl.max(tile, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(tile - higher), 0)
        peak = higher
    log_sum = peak + tl.log(total)
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, log_sum - chosen))

    if KEEP:
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tile = tl.load(logits + columns, mask=columns < V, other=0.0).to(ACC)
            gradient = tl.exp(tile - log_sum) - tl.where(columns == target, 1.0, 0.0)
            gradient = tl.where(target == IGNORED, 0.0, gradient)
            tl.store(logits + columns, gradient.to(logits.dtype.element_ty), mask=columns < V)


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int, keep: bool) -> Tensor:
    """The losses [n] of contiguous logits [n, V], in float32 or better; puts their gradient in place of the logits if kept.

    A target outside the vocabulary gives NaN.
    """
    n_tokens, vocabulary = logits.shape
    exact = torch.promote_types(logits.dtype, torch.float32)
    losses = workspace((n_tokens,), exact, logits.device)
    if n_tokens:
        sizes = {"BLOCK": 32} if INTERPRETED else {"BLOCK": 4096, "num_warps": 8, "num_stages": 1}
        with on_device(logits):
            cross_entropy_kernel[(n_tokens,)](
                logits, targets.contiguous(), losses, vocabulary,
                IGNORED=ignored, KEEP=keep, ACC=tl.float64 if exact == torch.float64 else tl.float32, **sizes,
            )  # fmt: skip
    return losses
