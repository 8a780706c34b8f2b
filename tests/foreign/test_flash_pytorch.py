"""FLASH-pytorch 0.1.9 with random weights, converted: the same outputs and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from tests.peers.packages import peer, randomized
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.foreign.flash_pytorch import from_flash_pytorch
from lineartime.layers import FLASH

D, S, CHUNK = 16, 40, 8
LENGTHS = [1, CHUNK, 3 * CHUNK + 5]


def theirs(name: str, **arguments: Any) -> Any:
    """`theirs("FLASH", dim=16)`: that class of FLASH-pytorch with random weights; skips if the package is not installed."""
    return randomized(getattr(peer("flash_pytorch.flash_pytorch"), name)(**arguments)).float()


def assert_agree(
    ours: Callable[[Tensor], Tensor],
    other: Callable[[Tensor], Tensor],
    x: Tensor,
    real: Tensor | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Assert that two functions have equal values and gradients at real tokens."""
    found = []
    direction: Tensor | None = None
    for function in (ours, other):
        given = x.detach().clone().requires_grad_()
        out = function(given)
        out = out if real is None else out[real]
        direction = torch.randn_like(out) if direction is None else direction
        (gradient,) = torch.autograd.grad((out * direction).sum(), given)
        found.append((out.detach(), gradient if real is None else gradient[real]))
    for one, two in zip(*found, strict=True):
        size = max(1.0, float(two.abs().max()))
        torch.testing.assert_close(one, two, atol=tolerance * size, rtol=0)


@every_pair(causal=[False, True], laplace=[False, True], length=LENGTHS)
def test_gau_stays_the_same_function(causal: bool, laplace: bool, length: int) -> None:
    other = theirs("GAU", dim=D, query_key_dim=S, causal=causal, laplace_attn_fn=laplace).double()
    options: dict[str, Any] = {"causal": causal, "laplace_attn_fn": laplace, "sequence_length": length if causal else None}
    ours = from_flash_pytorch(other.state_dict(), **options)
    x = torch.randn(2, length, D, dtype=torch.float64)
    assert_agree(ours, other, x, tolerance=1e-10)
    # Theirs divides by the number of tokens with padding: a row of ours is that row alone.
    if not causal and length > 2:
        mask = torch.arange(length) < torch.tensor([[length], [length - 2]])
        torch.testing.assert_close(ours(x, mask=mask)[1:, :-2], other(x[1:, :-2]), atol=1e-10, rtol=0)


@every_pair(causal=[False, True], shift=[False, True], length=LENGTHS, norm=["layernorm", "scalenorm"])
def test_flash_stays_the_same_function(causal: bool, shift: bool, length: int, norm: str) -> None:
    arguments: dict[str, Any] = {"group_size": CHUNK, "causal": causal, "shift_tokens": shift, "laplace_attn_fn": shift}
    norm_class = torch.nn.LayerNorm if norm == "layernorm" else peer("flash_pytorch.flash_pytorch").ScaleNorm
    other = theirs("FLASH", dim=D, query_key_dim=S, **arguments, norm_klass=norm_class).double()
    ours = from_flash_pytorch(other.state_dict(), **arguments)
    assert_agree(ours, other, torch.randn(2, length, D, dtype=torch.float64), tolerance=1e-9)
    assert isinstance(ours, FLASH)


def model_pair(causal: bool, norm: str, s: int = S) -> tuple[Any, Any]:
    arguments: dict[str, Any] = {"group_size": CHUNK, "causal": causal, "shift_tokens": True}
    other = theirs("FLASHTransformer", dim=D, num_tokens=30, depth=2, query_key_dim=s, norm_type=norm, **arguments)
    return from_flash_pytorch(other.state_dict(), **arguments), other


# 32 and all 8 features are rotated
@every_pair(s=[S, 8], norm=["scalenorm", "layernorm"], causal=[False, True], length=LENGTHS)
def test_model_has_the_same_logits(s: int, norm: str, causal: bool, length: int) -> None:
    ours, other = model_pair(causal, norm, s)
    ids = torch.randint(30, (2, length))
    expected = other(ids)
    size = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(ours(ids), expected, atol=1e-5 * size, rtol=0)
    torch.testing.assert_close(ours.double()(ids), other.double()(ids), atol=1e-5 * size, rtol=0)  # their angles are float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_become_float32(dtype: torch.dtype) -> None:
    weights = theirs("FLASHTransformer", dim=D, num_tokens=30, depth=2, query_key_dim=S).to(dtype).state_dict()
    torch.testing.assert_close(from_flash_pytorch(weights).backbone.embedding.weight, weights["token_emb.weight"].float())


def test_dropout_and_other_rotations_are_not_lost_in_silence() -> None:
    for name, arguments in (("FLASHTransformer", {"num_tokens": 30, "depth": 1}), ("FLASH", {}), ("GAU", {})):
        weights = theirs(name, dim=D, query_key_dim=S, **arguments).state_dict()
        with pytest.warns(UserWarning, match="FLASH-pytorch drops attention weights, and ours the outputs of layers: with"):
            built: Any = from_flash_pytorch(weights, dropout=0.25)
        dropped = [part.p for part in built.modules() if isinstance(part, torch.nn.Dropout)]
        assert dropped
        assert set(dropped) == {0.25}
    with pytest.raises(ArgumentError, match=r"interpolate_factor is 2.0, but must be 1: our layers rotate by whole positions"):
        from_flash_pytorch(weights, interpolate_factor=2.0)
    rotary = peer("rotary_embedding_torch").RotaryEmbedding
    for unusual in (rotary(32, theta_rescale_factor=2.0), rotary(32, freqs_for="pixel")):
        other = theirs("FLASH", dim=D, query_key_dim=S)
        other.rotary_pos_emb = unusual
        with pytest.raises(LineartimeError, match=r"rotary_pos_emb.freqs holds other frequencies than 10000\^\(-2 i / n\)"):
            from_flash_pytorch(other.state_dict())


def test_weights_of_something_else_are_named() -> None:
    unfit: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
        (lambda w: w.pop("layers.0.to_out.bias"), "lack layers.0.to_out.bias"),
        (lambda w: w.update({"layers.0.more": torch.zeros(2)}), "hold 'layers.0.more', which FLASH-pytorch does not have"),
        (lambda w: w.update({"to_logits.0.bias": torch.zeros(3)}), r"to_logits.0.bias has shape \[3\]"),
        (lambda w: w.pop("layers.1.rotary_pos_emb.freqs"), "have layers that differ in their sizes"),
        (
            lambda w: w.update({"layers.0.to_hidden.0.weight": torch.zeros(2 * (2 * D + 1), D)}),
            f"have values of width {2 * D + 1} and queries of width {S} of which 32 are rotated, but ours have a",
        ),
        (lambda w: w.clear(), "do not belong to a model or layer of FLASH-pytorch"),
    ]
    weights = theirs("FLASHTransformer", dim=D, num_tokens=30, depth=2, query_key_dim=S).state_dict()
    for change, message in unfit:
        changed = dict(weights)
        change(changed)
        with pytest.raises(LineartimeError, match=message):
            from_flash_pytorch(changed)
    with pytest.raises(ArgumentError, match="sequence_length is None, but must be given for a causal GAU"):
        from_flash_pytorch(theirs("GAU", dim=D, causal=True).state_dict(), causal=True)
    module: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"weights is of type .*, but must be tensors by name: give model.state_dict"):
        from_flash_pytorch(module)
