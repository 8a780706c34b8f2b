"""Transforms of torch.func and forward-mode derivatives, for which the fast operators have no rules."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import lineartime
from lineartime.layers import FLASH, GAU, Attention, set_backend
from lineartime.models import CausalLM, MaskedLM
from lineartime.models.systems import SYSTEMS
from lineartime.native import why_not_native

# PyTorch's forward-mode derivatives of its own functions are written in TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")


def test_masks_count_no_position_beyond_the_last_learned_one() -> None:
    model = lineartime.build("transformer-tiny", "mlm", d_model=16, n_heads=2, n_blocks=1, max_positions=5).eval()
    ids, mask = torch.arange(16).view(2, 8), torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 1]])
    weights = dict(model.named_parameters())
    found = grad(lambda weights: functional_call(model, weights, (ids, mask)).square().mean())(weights)
    expected = torch.autograd.grad(model(ids, mask).square().mean(), list(weights.values()))
    for name, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)


# One of each form that PyTorch has to differentiate otherwise, or whose batch holds masks, sorted tokens or landmarks.
some_systems = pytest.mark.parametrize(
    "model",
    ["flash", "flash-quad", "transformer++", "performer-chunked", "combiner", "reformer", "flash-weighted", "linformer"],
    indirect=True,
)


@pytest.fixture(params=["flash", "gau"])
def layer(request: pytest.FixtureRequest) -> FLASH | GAU:
    torch.manual_seed(1)
    layer = FLASH(16, d_qk=8, chunk_size=8, causal=True) if request.param == "flash" else GAU(16, d_qk=8, causal=True)
    layer.double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model(request: pytest.FixtureRequest, tiny: Any) -> CausalLM | MaskedLM:
    """A small model of the system that an indirect parameter names."""
    torch.manual_seed(1)
    task: Any = "clm" if SYSTEMS[request.param].mixer.why_not_causal is None else "mlm"
    built: CausalLM | MaskedLM = tiny(request.param, task, noise=0.3, vocab_size=11).double().eval()
    return built


class Loss(torch.nn.Module):
    def __init__(self, model: CausalLM | MaskedLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return self.model.loss(ids, targets, mask=mask)


@some_systems
def test_forward_mode_derivatives_of_a_model_are_those_of_its_backward_pass(model: CausalLM | MaskedLM) -> None:
    ids = torch.randint(0, 11, (2, 45))
    parameters = dict(model.named_parameters())
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}
    weights = tokens(2, 45, 11)

    def score(values: dict[str, Tensor]) -> Tensor:
        logits: Tensor = functional_call(model, values, (ids,))
        return (logits * weights).sum()

    gradients = torch.autograd.grad(score(parameters), [*parameters.values()], materialize_grads=True, allow_unused=True)
    expected = torch.stack([(g * d).sum() for g, d in zip(gradients, direction.values(), strict=True)]).sum()
    torch.testing.assert_close(jvp(score, (parameters,), (direction,))[1], expected)


@some_systems
def test_gradients_of_single_examples_by_vmap_are_those_of_the_examples_alone(model: CausalLM | MaskedLM) -> None:
    """Of the loss, as training takes it, with padding of a length of its own in each example."""
    ids = torch.randint(0, 11, (3, 45))
    mask = torch.arange(45) < torch.tensor([45, 20, 33])[:, None]
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
        targets = ids[None].masked_fill(~mask[None], -100)
        of_model = {f"model.{name}": value for name, value in values.items()}
        value: Tensor = functional_call(Loss(model), of_model, (ids[None], targets, mask[None]))
        return value

    found = vmap(grad(loss), in_dims=(None, 0, 0), randomness="same")(parameters, ids, mask)
    for row in range(3):
        model.zero_grad()
        loss(parameters, ids[row], mask[row]).backward()
        for name, parameter in parameters.items():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name][row], expected, msg=name)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FLASH, {"d_qk": 8, "chunk_size": 4}),
        (GAU, {"d_qk": 8}),
        (Attention, {"n_heads": 2}),
        (Attention, {"n_heads": 2, "token_shift": True}),
    ],
)
def test_transforms_of_streams_are_those_of_the_streams_alone(kind: Any, options: Any) -> None:
    streaming = kind(16, causal=True, **options).double().requires_grad_(False)

    def read(x: Tensor) -> Tensor:
        first, state = streaming.extend(x[:, :3], None)
        second, state = streaming.extend(x[:, 3:5], state)
        return torch.cat([first, second, streaming.extend(x[:, 5:], state)[0]], 1)

    x = tokens(3, 1, 6, 16)
    torch.testing.assert_close(vmap(read)(x), torch.stack([read(each) for each in x]))
    one, direction, weights = x.unbind(0)
    one.requires_grad_()
    (gradient,) = torch.autograd.grad((read(one) * weights).sum(), one)
    _, tangent = jvp(read, (one.detach(),), (direction,))
    torch.testing.assert_close((tangent * weights).sum(), (gradient * direction).sum())


def test_forward_mode_outside_torch_func_keeps_the_attention(layer: FLASH | GAU) -> None:
    x, direction, weights = tokens(3, 2, 37, 16).unbind(0)
    expected = (torch.func.vjp(layer, x)[1](weights)[0] * direction).sum()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
    torch.testing.assert_close((tangent * weights).sum(), expected)


def test_jacobians_and_hessians_of_a_layer_are_those_of_plain_pytorch(layer: FLASH | GAU) -> None:
    x = tokens(1, 5, 16)
    forward, reverse = jacfwd(layer)(x), jacrev(layer)(x)
    curvature = hessian(lambda x: layer(x).square().sum())(x)
    set_backend(layer, "torch")
    expected: Any = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(forward, expected)
    torch.testing.assert_close(reverse, expected)
    expected = torch.autograd.functional.hessian(lambda x: layer(x).square().sum(), x)
    torch.testing.assert_close(curvature, expected)


@pytest.mark.parametrize(
    ("kind", "options", "case"),
    [
        *((FLASH, {"chunk_size": 8, "token_shift": True}, case) for case in ("mask", "pack", "prefix")),
        (GAU, {}, "prefix"),
        (Attention, {"n_heads": 2}, "prefix"),
    ],
)
def test_transforms_read_masks_documents_and_prefixes(kind: Any, options: Any, case: str) -> None:
    layer = kind(16, causal=case == "prefix", **options, **({} if kind is Attention else {"d_qk": 8})).double()
    x, mask = tokens(3, 1, 37, 16), torch.rand(3, 1, 37) > 0.3
    cu_seqlens, prefixes = torch.tensor([0, 5, 37]) if case == "pack" else None, torch.tensor([[0], [9], [12]])

    def read(x: Tensor, mask: Tensor, prefix: Tensor) -> Tensor:
        return layer(x, mask, cu_seqlens, prefix if case == "prefix" else None)

    found, along = jvp(lambda x: vmap(read)(x, mask, prefixes).square().sum(), (x,), (x.flip(0),))
    gradients = vmap(grad(lambda *each: read(*each).square().sum()))(x, mask, prefixes)
    set_backend(layer, "torch")
    expected = torch.stack([*map(read, x.requires_grad_(), mask, prefixes)]).square().sum()
    (wanted,) = torch.autograd.grad(expected, x)
    for pair in ((found, expected), (gradients, wanted), (along, (wanted * x.flip(0)).sum())):
        torch.testing.assert_close(*pair)


@pytest.mark.nightly
def test_compiled_transform_is_the_transform(layer: FLASH | GAU) -> None:
    def gradient(x: Tensor) -> Tensor:
        value: Tensor = grad(lambda x: layer(x).square().sum())(x)
        return value

    x = tokens(2, 37, 16)
    torch.testing.assert_close(torch.compile(gradient)(x), gradient(x))


@pytest.mark.skipif(why_not_native() is not None, reason="tiles need functions in C++")
def test_tiled_form_refuses_what_it_would_drop_from_a_derivative(layer: FLASH | GAU) -> None:
    set_backend(layer, "tiled")
    x = tokens(1, 5, 16)
    with pytest.raises(
        ValueError, match=r"backend is 'tiled', which cannot run here: .* forward-mode .* use 'auto' or 'torch'"
    ):
        jvp(layer, (x,), (x,))
    layer(x).sum().backward()  # ordinary backward passes are its own
