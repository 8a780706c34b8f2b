"""Logits and cross-entropy in one op, so that the logits of a large vocabulary are never all in memory.

Shapes: B batch, T tokens, d model width, V vocabulary, n tokens of a piece.

    loss = sum over tokens of  logsumexp(W h) - (W h)[target]        W [V, d], h [d]

PyTorch has had `linear_cross_entropy` since 2.13. This op also runs on older versions, and saves memory in compiled code too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.backends import why_not
from lineartime.ops.checks import check_whole, is_readable
from lineartime.ops.modes import acc_dtype, matmul_dtype, under_transform, without_autocast
from lineartime.ops.operator import register_operator

IGNORED = -100
"""The target of a token that does not count in the loss."""

LOGITS = {"cpu": 2**23, "cuda": 2**28}
"""The approximate number of logits in memory at a time; with fewer, a GPU would idle."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropy losses, in nats, of the logits `hidden @ weight.T`.

    Args:
        hidden: [B, T, d].
        weight: [V, d].
        targets: int [B, T], from 0 to V - 1, or `IGNORED`.

    Returns:
        A scalar in float32 (float64 for float64 inputs). Under autocast, products are computed in its dtype, but never in
        float16, where the gradients of a sum would overflow. Sums are in float32. The result can be differentiated once. Under
        a transform of torch.func and in forward mode, it can be differentiated any number of times, but there all logits are
        in memory.

    Raises:
        ArgumentError: if shapes do not match, or targets are not integers or are outside the vocabulary.
    """
    check_whole("targets", targets)
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or targets.shape != hidden.shape[:2]:
        raise ArgumentError(
            "hidden",
            f"has shape {list(hidden.shape)}, weight {list(weight.shape)} and targets {list(targets.shape)}, but they must be "
            "[B, T, d], [V, d] and [B, T].",
        )
    if is_readable(targets):
        wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= len(weight)))]
        if len(wrong):
            raise ArgumentError(
                "targets", f"holds {wrong[0]}, but must be from 0 to vocab_size - 1 = {len(weight) - 1}, or {IGNORED} for none."
            )
    if under_transform():
        compute = matmul_dtype(hidden, weight)
        with without_autocast(hidden):
            logits = (hidden.to(compute) @ weight.to(compute).T).to(acc_dtype(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORED, reduction="sum")
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = _operator(hidden.flatten(0, 1), weight, targets.flatten(), matmul_dtype(hidden, weight), keep)[0]
    return loss


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, compute: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and, with `keep`, its gradients, because computing them later would need the logits again."""
    acc = acc_dtype(hidden)
    loss = hidden.new_zeros((), dtype=acc)
    d_hidden = hidden.new_empty(hidden.shape if keep else 0, dtype=compute)  # that of the products which it is
    d_weight = weight.new_zeros(weight.shape if keep else 0, dtype=acc)
    size = max(1, LOGITS.get(hidden.device.type, LOGITS["cpu"]) // len(weight))
    fused = _can_fuse(hidden, compute)
    with without_autocast(hidden):
        factor = weight.to(compute)
        for start in range(0, len(hidden), size):
            piece = hidden[start : start + size].to(compute)
            losses, d_logits = _losses(piece @ factor.T, targets[start : start + size], keep, fused)
            loss += losses.sum()
            if keep:
                d_hidden[start : start + size] = d_logits @ factor
                if compute == acc:  # saves the product from memory
                    d_weight.addmm_(d_logits.T, piece)
                else:
                    d_weight += d_logits.T @ piece
    return loss, d_hidden, d_weight


def _can_fuse(hidden: Tensor, compute: torch.dtype) -> bool:
    return hidden.is_cuda and why_not("triton", hidden.device, compute, "relu2") is None


def _losses(logits: Tensor, targets: Tensor, keep: bool, fused: bool) -> tuple[Tensor, Tensor]:
    """The losses [n] of logits [n, V] and, with `keep`, the gradient of the logits, in their dtype."""
    if fused:
        from lineartime.ops.triton.kernels import cross_entropy_  # Triton may be absent

        return cross_entropy_(logits, targets, IGNORED, keep), logits  # which it has overwritten
    numbers = logits.to(acc_dtype(logits))
    real = (targets != IGNORED)[:, None]
    column = targets[:, None].masked_fill(~real, 0)
    own, largest = numbers.gather(1, column), numbers.amax(-1, keepdim=True)
    powers = numbers.sub_(largest).exp_()
    sums = powers.sum(-1, keepdim=True)
    losses = (sums.log() + largest - own).masked_fill(~real, 0.0)
    if keep:
        d_logits = powers.mul_(real / sums)  # softmax - one_hot(target)
        logits = d_logits.scatter_add_(1, column, -real.to(sums.dtype)).to(logits.dtype)
    return losses, logits


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, compute: torch.dtype, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    acc = acc_dtype(hidden)
    of_hidden, of_weight = (x.new_empty(x.shape if keep else 0, dtype=to) for x, to in ((hidden, compute), (weight, acc)))
    return hidden.new_empty((), dtype=acc), of_hidden, of_weight


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.dtypes = [x.dtype for x in inputs[:2]]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else PyTorch would make zeros of their sizes


def _differentiate(ctx: Any, d_loss: Tensor, *_not_differentiable: None) -> tuple[Tensor | None, ...]:
    gradients = [(d_loss * kept.to(d_loss.dtype)).to(to) for kept, to in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
    return *gradients, None, None, None


_operator = register_operator(
    _linear_cross_entropy, _fake, n_results=3, keep_for_backward=_keep_for_backward, differentiate=_differentiate,
    once=("model.loss", "take the cross-entropy of model(ids)"),
)  # fmt: skip
