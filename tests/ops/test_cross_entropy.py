"""Logits and loss in one op, against the two one after the other."""

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import SizesWritten, assert_same_with_gradients
from tests.pairs import every_pair
from torch import Tensor

from lineartime.ops import cross_entropy
from lineartime.ops.cross_entropy import IGNORED, linear_cross_entropy


def make_inputs(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    targets = torch.randint(0, 11, (2, tokens))
    targets[:, ::3] = IGNORED
    hidden, weight = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((2, tokens, 5), (11, 5)))
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)


@every_pair(tokens=[0, 1, 65], pieces_of=[1, 8, 1000])
def test_loss_and_gradients_are_those_of_logits_and_cross_entropy(
    tokens: int, pieces_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS", {"cpu": 11 * pieces_of})
    hidden, weight, targets = make_inputs(tokens)
    losses = linear_cross_entropy(hidden, weight, targets), plain(hidden, weight, targets)
    assert_same_with_gradients(*losses, [hidden, weight], atol=1e-10)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.full((1, 1, 5), 1e3, requires_grad=True)
    weight = torch.linspace(-30, 30, 55).view(11, 5).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.tensor([[0]]))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_products_in_its_dtype_and_keeps_the_gradients_own(dtype: torch.dtype) -> None:
    hidden, weight, targets = make_inputs(64, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    exact = plain(hidden.double(), weight.double(), targets)
    torch.testing.assert_close(loss.double(), exact, atol=0, rtol=1e-2)
    assert loss.item() != exact.item()


def test_logits_of_all_tokens_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS", {"cpu": 11 * 16})
    hidden, weight, targets = make_inputs(200)
    with SizesWritten() as written:  # around the function: what happens inside an operator cannot be seen from outside
        cross_entropy._linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), torch.float64, True)
    assert max(written.sizes) == hidden.numel() < 400 * 11


def test_pytorch_can_check_and_compile_it() -> None:
    hidden, weight, targets = make_inputs(7, torch.float32)
    flat = hidden.detach().flatten(0, 1).requires_grad_()
    torch.library.opcheck(cross_entropy._operator, (flat, weight, targets.flatten(), torch.float32, True))
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    losses = [function(hidden, weight, targets) for function in (compiled, linear_cross_entropy)]
    assert_same_with_gradients(*losses, [hidden, weight], atol=1e-5, rtol=1e-5)


def test_target_outside_the_vocabulary_is_no_target() -> None:
    hidden, weight, targets = make_inputs(4)
    targets[0, 1] = -1
    with pytest.raises(ValueError, match=r"targets holds -1, but must be from 0 to vocab_size - 1 = .*, or -100 for none"):
        linear_cross_entropy(hidden, weight, targets)


def test_second_derivative_is_refused_and_not_wrong() -> None:
    hidden, weight, targets = make_inputs(4)
    with pytest.raises(RuntimeError, match=r"model\.loss can be differentiated only once: .* cross-entropy of model"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), weight, create_graph=True)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden has shape \[2, 3, 5\], weight \[11, 4\] and targets \[2, 3\]"):
        linear_cross_entropy(torch.ones(2, 3, 5), torch.ones(11, 4), torch.ones(2, 3, dtype=torch.long))


def test_transforms_take_targets_of_any_integers() -> None:
    hidden, weight, targets = torch.randn(2, 3, 4), torch.randn(7, 4), torch.randint(7, (2, 3))
    expected = torch.func.grad(lambda h: linear_cross_entropy(h, weight, targets))(hidden)
    assert torch.equal(torch.func.grad(lambda h: linear_cross_entropy(h, weight, targets.int()))(hidden), expected)
