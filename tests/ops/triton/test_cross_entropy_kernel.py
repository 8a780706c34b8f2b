"""The kernel of the cross-entropy against PyTorch's own in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import assert_same_with_gradients
from tests.pairs import every_pair

from lineartime.ops import cross_entropy
from lineartime.ops.cross_entropy import IGNORED, linear_cross_entropy

kernels = pytest.importorskip("lineartime.ops.triton.kernels")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@every_pair(vocabulary=[1, 31, 32, 33, 100], pieces_of=[1, 8, 1000])  # the interpreter has blocks of 32
def test_loss_and_gradients_are_those_of_pytorch(
    vocabulary: int, pieces_of: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS", dict.fromkeys(("cpu", "cuda"), vocabulary * pieces_of))
    monkeypatch.setattr(cross_entropy, "_can_fuse", lambda *_: True)
    targets = torch.randint(0, vocabulary, (2, 9), device=device)
    targets[:, ::3] = IGNORED
    shapes = (2, 9, 5), (vocabulary, 5)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, device=device).requires_grad_() for shape in shapes)
    logits = (hidden @ weight.T).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    assert_same_with_gradients(
        linear_cross_entropy(hidden, weight, targets), expected, [hidden, weight], atol=1e-12, rtol=1e-12
    )


def test_logits_stay_where_no_gradient_is_kept(device: str) -> None:
    logits = torch.randn(3, 40, device=device)
    before = logits.clone()
    kernels.cross_entropy_(logits, torch.tensor([1, IGNORED, 2], device=device), IGNORED, False)
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow(device: str) -> None:
    logits = torch.tensor([[1e5, -1e5, 0.0] * 30], device=device)
    [loss] = kernels.cross_entropy_(logits, torch.tensor([1], device=device), IGNORED, True)
    assert float(loss) == pytest.approx(2e5 + math.log(30), rel=1e-6)
    assert logits.isfinite().all()


@pytest.mark.parametrize("target", [40, -1])
def test_target_outside_the_vocabulary_is_not_read_from_other_memory(target: int, device: str) -> None:
    logits = torch.randn(2, 40, device=device)
    losses = kernels.cross_entropy_(logits, torch.tensor([3, target], device=device), IGNORED, True)
    assert losses.isnan().tolist() == [False, True]


def test_bfloat16_errs_as_little_as_plain_pytorch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.randint(0, 50, (2, 9), device=device)
    hidden, weight = (torch.randn(n, dtype=torch.bfloat16, device=device).requires_grad_() for n in ((2, 9, 8), (50, 8)))
    logits = (hidden.double() @ weight.double().T).flatten(0, 1)
    exact = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    errors = []
    for fused in (False, True):
        monkeypatch.setattr(cross_entropy, "_can_fuse", lambda *_arguments, fused=fused: fused)
        errors.append((linear_cross_entropy(hidden, weight, targets).detach().double() - exact.detach()).abs())
    assert errors[1] <= 2 * errors[0] + 1e-5 * exact.detach()
