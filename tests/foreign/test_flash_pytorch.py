"""FLASH-pytorch 0.1.9 with random weights, converted: the same outputs and gradients, and back the same weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

import lineartime
from lineartime.errors import ArgumentError, LineartimeError
from lineartime.foreign import ForeignFLASH, from_flash_pytorch, to_flash_pytorch
from lineartime.layers import FLASH, ScaleNorm

D, S, CHUNK = 16, 40, 8
LENGTHS = [1, CHUNK, 3 * CHUNK + 5]


def norm_of(name: str) -> type[Any]:
    from flash_pytorch.flash_pytorch import ScaleNorm as Theirs

    return {"layernorm": torch.nn.LayerNorm, "scalenorm": Theirs}[name]


@every_pair(causal=[False, True], laplace=[False, True], length=LENGTHS)
def test_a_gau_stays_the_same_function(
    causal: bool, laplace: bool, length: int, theirs: Callable[..., Any], assert_agree: Callable[..., None]
) -> None:
    other = theirs("GAU", dim=D, query_key_dim=S, causal=causal, laplace_attn_fn=laplace).double()
    ours = from_flash_pytorch(
        other.state_dict(), causal=causal, laplace_attn_fn=laplace, sequence_length=length if causal else None
    )
    x = torch.randn(2, length, D, dtype=torch.float64)
    assert_agree(ours, other, x, tolerance=1e-10)
    # Theirs divides by the number of tokens with padding: a row of ours is that row alone.
    if not causal and length > 2:
        mask = torch.arange(length) < torch.tensor([[length], [length - 2]])
        torch.testing.assert_close(ours(x, mask=mask)[1:, :-2], other(x[1:, :-2]), atol=1e-10, rtol=0)


@every_pair(causal=[False, True], shift=[False, True], length=LENGTHS, norm=["layernorm", "scalenorm"])
def test_a_flash_stays_the_same_function_and_comes_back(
    causal: bool, shift: bool, length: int, norm: str, theirs: Callable[..., Any], assert_agree: Callable[..., None]
) -> None:
    arguments = {"group_size": CHUNK, "causal": causal, "shift_tokens": shift, "laplace_attn_fn": shift}
    other = theirs("FLASH", dim=D, query_key_dim=S, **arguments, norm_klass=norm_of(norm)).double()
    ours = from_flash_pytorch(other.state_dict(), **arguments)
    assert_agree(ours, other, torch.randn(2, length, D, dtype=torch.float64), tolerance=1e-9)
    assert isinstance(ours, FLASH)
    back, built_with = to_flash_pytorch(ours)
    assert back.keys() == other.state_dict().keys()
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(back[name].to(tensor), tensor)
    assert {name: built_with[name] for name in arguments} == arguments


def model_pair(theirs: Callable[..., Any], causal: bool, norm: str, s: int = S) -> tuple[Any, Any]:
    arguments = {"group_size": CHUNK, "causal": causal, "shift_tokens": True}
    other = theirs("FLASHTransformer", dim=D, num_tokens=30, depth=2, query_key_dim=s, norm_type=norm, **arguments)
    return from_flash_pytorch(other.state_dict(), **arguments), other


# 32 and all 8 features are rotated
@every_pair(s=[S, 8], norm=["scalenorm", "layernorm"], causal=[False, True], length=LENGTHS)
def test_a_model_has_the_same_logits(s: int, norm: str, causal: bool, length: int, theirs: Callable[..., Any]) -> None:
    ours, other = model_pair(theirs, causal, norm, s)
    ids = torch.randint(30, (2, length))
    expected = other(ids)
    size = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(ours(ids), expected, atol=1e-5 * size, rtol=0)
    torch.testing.assert_close(ours.double()(ids), other.double()(ids), atol=1e-5 * size, rtol=0)  # their angles are float32


@pytest.mark.parametrize("causal", [False, True])
def test_texts_of_different_lengths_have_the_same_logits_in_a_batch(causal: bool, theirs: Callable[..., Any]) -> None:
    ours, other = model_pair(theirs, causal, "scalenorm")
    lengths = [3 * CHUNK + 5, 1, CHUNK + 3]
    ids, mask = torch.randint(30, (3, max(lengths))), torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    together = ours(ids, mask=mask)
    for row, length in enumerate(lengths):
        alone = other(ids[row : row + 1, :length])[0]
        torch.testing.assert_close(together[row, :length], alone, atol=1e-4, rtol=1e-5)
    if causal:  # both ways, theirs divides by the number of tokens with padding
        torch.testing.assert_close(together[mask], other(ids, mask=mask)[mask], atol=1e-4, rtol=1e-5)


def test_a_causal_model_streams_what_it_reads_at_once(theirs: Callable[..., Any]) -> None:
    ours, other = model_pair(theirs, True, "scalenorm")
    ids, state, pieces = torch.randint(30, (2, 21)), ours.init_state(2), []
    for start, stop in ((0, 5), (5, 6), (6, 21)):
        logits, state = ours.extend(ids[:, start:stop], state)
        pieces.append(logits)
    torch.testing.assert_close(torch.cat(pieces, 1), other(ids), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("norm", ["scalenorm", "layernorm"])
def test_a_model_of_ours_becomes_one_of_theirs(norm: Any, theirs: Callable[..., Any]) -> None:
    eps = {"scalenorm": 1e-10, "layernorm": 1e-5}[norm]
    options: dict[str, Any] = {
        "mixer": "flash-foreign",
        "normalization": "paper_sum",
        "bias_form": "buckets",
        "rotary_width": 32,
        "final_norm": "layernorm",
    }
    ours = lineartime.build(
        "flash-tiny", n_blocks=2, d_model=D, d_qk=S, chunk_size=CHUNK, norm=norm, norm_eps=eps, initial_scores="unit", **options
    )
    weights, arguments = to_flash_pytorch(ours)
    other = theirs("FLASHTransformer", **arguments)
    other.load_state_dict(weights)
    ids = torch.randint(258, (2, 21))
    torch.testing.assert_close(other(ids), ours(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "scalenorm"}, "norm_eps is 1e-05, but must be at most 1e-10 for the scalenorm of FLASH-pytorch"),
        ({"normalization": "count"}, "normalization is 'count', but FLASH-pytorch has only 'paper_sum'"),
        (
            {"bias_form": "auto", "norm": "layernorm"},
            "bias_form is 'auto', but FLASH-pytorch has only a relative bias by buckets",
        ),
        ({"rotary_width": 8}, "rotary_width is 8, but FLASH-pytorch has only 32"),
        (
            {"final_norm": "same", "norm": "scalenorm"},
            "norm is 'scalenorm', but FLASH-pytorch has only 'layernorm' before the logits",
        ),
    ],
)
def test_an_option_that_flash_pytorch_does_not_have_is_named(options: dict[str, Any], message: str) -> None:
    fitting = {"normalization": "paper_sum", "bias_form": "buckets", "rotary_width": 32, "final_norm": "layernorm"}
    fitting["mixer"] = "flash-foreign"
    model = lineartime.build("flash-tiny", n_blocks=1, d_model=D, d_qk=S, chunk_size=CHUNK, **{**fitting, **options})
    with pytest.raises(ArgumentError, match=message):
        to_flash_pytorch(model)


def test_a_layer_that_computes_something_else_is_not_converted() -> None:
    class Ungated(ForeignFLASH):
        pass

    options: dict[str, Any] = {"d_qk": S, "chunk_size": CHUNK, "normalization": "paper_sum", "bias_form": "buckets"}
    with pytest.raises(ArgumentError, match="model is a Ungated, which may compute something else"):
        to_flash_pytorch(Ungated(D, **options))
    model = lineartime.build(
        "flash-tiny", n_blocks=1, d_model=D, mixer="flash-foreign", rotary_width=32, final_norm="layernorm", **options
    )
    next(iter(model.backbone.blocks)).mixer = Ungated(D, causal=True, rotary_width=32, **options)
    with pytest.raises(
        ArgumentError, match=r"model has a Ungated as backbone.blocks.0.mixer, but a ForeignFLASH in its config"
    ):
        to_flash_pytorch(model)


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda w: w.pop("layers.0.to_out.bias"), {}, "lack layers.0.to_out.bias"),
        (lambda w: w.update({"layers.0.more": torch.zeros(2)}), {}, "hold 'layers.0.more', which FLASH-pytorch does not have"),
        (lambda w: w.update({"to_logits.0.bias": torch.zeros(3)}), {}, r"to_logits.0.bias has shape \[3\]"),
        (lambda w: w.update({"layers.1.rotary_pos_emb.freqs": torch.zeros(16)}), {}, "does not hold the standard rotary"),
        (
            lambda w: w.update({"layers.0.to_hidden.0.weight": torch.zeros(2 * (2 * D + 1), D)}),
            {},
            f"have values of width {2 * D + 1} and queries of width {S} of which 32 are rotated, but ours have a",
        ),
        (lambda w: w.clear(), {}, "do not belong to a model or layer of FLASH-pytorch"),
        (lambda w: None, {"reduce_group_non_causal_attn": False}, "reduce_group_non_causal_attn is False"),
    ],
)
def test_weights_of_something_else_are_named(
    change: Callable[[dict[str, Tensor]], Any], arguments: dict[str, Any], message: str, theirs: Callable[..., Any]
) -> None:
    weights = dict(theirs("FLASHTransformer", dim=D, num_tokens=30, depth=2, query_key_dim=S).state_dict())
    change(weights)
    with pytest.raises(LineartimeError, match=message):
        from_flash_pytorch(weights, **arguments)


def test_a_causal_gau_needs_the_length_that_it_divides_by(theirs: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match="sequence_length is None, but must be given for a causal GAU"):
        from_flash_pytorch(theirs("GAU", dim=D, causal=True).state_dict(), causal=True)


def test_a_norm_of_theirs_is_ours_with_its_epsilon_under_the_root() -> None:
    x = torch.randn(5, D, dtype=torch.float64) * torch.logspace(-2, 3, 5, dtype=torch.float64)[:, None]
    ours = ScaleNorm(1e-10).double()(x)
    torch.testing.assert_close(ours, x / x.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_saved_in_half_precision_are_not_taken_for_those_of_other_rotations(
    dtype: torch.dtype, theirs: Callable[..., Any]
) -> None:
    weights = theirs("FLASHTransformer", dim=D, num_tokens=30, depth=2, query_key_dim=S, causal=True).to(dtype).state_dict()
    ours = from_flash_pytorch(weights, causal=True)
    torch.testing.assert_close(ours.backbone.embedding.weight, weights["token_emb.weight"].float())
    wrong = {name: 1.1 * tensor if name.endswith("freqs") else tensor for name, tensor in weights.items()}
    with pytest.raises(LineartimeError, match="does not hold the standard rotary frequencies"):
        from_flash_pytorch(wrong, causal=True)


def test_weights_that_are_no_tensors_by_name_are_named() -> None:
    given: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"weights is of type .*, but must be tensors by name: give model.state_dict"):
        from_flash_pytorch(given)
