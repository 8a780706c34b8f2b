"""The kernel of the cross-entropy against PyTorch's own in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.ops import cross_entropy
from lineartime.ops.cross_entropy import IGNORED, linear_cross_entropy

kernels = pytest.importorskip("lineartime.ops.triton.kernels")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def make_inputs(tokens: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    targets[::3] = IGNORED
    return 3 * torch.randn(tokens, vocabulary, dtype=torch.float64, device=device), targets


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100])  # the interpreter has blocks of 32
def test_losses_and_gradients_are_those_of_pytorch(vocabulary: int, device: str) -> None:
    logits, targets = make_inputs(7, vocabulary, device)
    leaf = logits.clone().requires_grad_()
    exact = F.cross_entropy(leaf, targets, reduction="none", ignore_index=IGNORED)
    [gradient] = torch.autograd.grad(exact.sum(), leaf)
    losses = kernels.cross_entropy_(logits, targets, IGNORED, True)
    torch.testing.assert_close(losses, exact, atol=1e-12, rtol=0)
    torch.testing.assert_close(logits, gradient, atol=1e-12, rtol=0)


def test_logits_stay_where_no_gradient_is_kept(device: str) -> None:
    logits, targets = make_inputs(3, 40, device)
    before = logits.clone()
    kernels.cross_entropy_(logits, targets, IGNORED, False)
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow(device: str) -> None:
    logits = torch.tensor([[1e5, -1e5, 0.0] * 30], device=device)
    [loss] = kernels.cross_entropy_(logits, torch.tensor([1], device=device), IGNORED, True)
    assert float(loss) == pytest.approx(2e5 + math.log(30), rel=1e-6)
    assert logits.isfinite().all()


@pytest.mark.parametrize("target", [40, -1])
def test_target_outside_the_vocabulary_is_not_read_from_other_memory(target: int, device: str) -> None:
    logits, _ = make_inputs(2, 40, device)
    losses = kernels.cross_entropy_(logits, torch.tensor([3, target], device=device), IGNORED, True)
    assert losses.isnan().tolist() == [False, True]


@pytest.mark.parametrize("pieces_of", [1, 8, 1000])
def test_op_with_the_kernel_is_the_op_without(pieces_of: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS", dict.fromkeys(("cpu", "cuda"), 11 * pieces_of))
    targets = torch.randint(0, 11, (2, 9), device=device)
    targets[:, ::3] = IGNORED
    hidden, weight = (torch.randn(n, dtype=torch.float64, device=device).requires_grad_() for n in ((2, 9, 5), (11, 5)))
    results: list[Any] = []
    for fused in (False, True):
        monkeypatch.setattr(cross_entropy, "_can_fuse", lambda *_arguments, fused=fused: fused)
        loss = linear_cross_entropy(hidden, weight, targets)
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


def test_bfloat16_errs_as_little_as_plain_pytorch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.randint(0, 50, (2, 9), device=device)
    hidden, weight = (torch.randn(n, dtype=torch.bfloat16, device=device).requires_grad_() for n in ((2, 9, 8), (50, 8)))
    logits = (hidden.double() @ weight.double().T).flatten(0, 1)
    exact = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    errors = []
    for fused in (False, True):
        monkeypatch.setattr(cross_entropy, "_can_fuse", lambda *_arguments, fused=fused: fused)
        errors.append((linear_cross_entropy(hidden, weight, targets).detach().double() - exact.detach()).abs())
    assert errors[1] <= 2 * errors[0] + 1e-5 * exact.detach()
