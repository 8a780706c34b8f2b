"""GAU, FLASH and a whole model of FLASH against FLASH-pytorch, with normalization="paper".

How it differs, and what is done about it here:
- Its relative bias is that of T5, in buckets of distances: its values are copied into our table. In its GAU the bias is divided
  by the length like the product.
- Its causal linear part is a sum over the chunks before. Ours is their mean, as published, so that both are the same for up to
  two chunks. Bidirectional, it divides by the number of tokens; ours by chunks times C, the same for full chunks.
- Its causal GAU divides by the current length, which shows early tokens how long the text will be; ours by `max_length`.
- It rotates neighbouring features instead of halves, at most 32 of them, and its angles are float32; its GAU does not rotate.
- Its model has logits of its own: they are tied here. Its ScaleNorm has no epsilon under the root: the norm is LayerNorm here.
- It shifts half of the features by a token, which is an option of ours. With a mask, its token before may be padding.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lineartime
from lineartime.foreign import ForeignFLASH, ForeignGAU

D_MODEL, D_QK, CHUNK = 16, 8, 8


def table(bias: Tensor) -> Tensor:
    """The values by distance, [2 n - 1], of a bias [n, n] that depends on the distance alone."""
    return torch.cat([bias[-1], bias[0, 1:]])


def weights_of(ours: Any, reorder: list[int], interleaved: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Weights that a layer of theirs shares with ours; `reorder` says where its queries and keys are among ours."""
    weights = {"norm.weight": ours.norm.weight, "norm.bias": ours.norm.bias}
    for kind in ("weight", "bias"):
        gate, value, base = getattr(ours.to_gate_value_base, kind).split([2 * D_MODEL, 2 * D_MODEL, D_QK])
        weights |= {f"to_hidden.0.{kind}": torch.cat([value, gate]), f"to_qk.0.{kind}": interleaved(base)}
    for parameter in ("gamma", "beta"):
        weights[parameter] = interleaved(getattr(ours, parameter)[reorder].mT).mT
    return weights


@pytest.fixture
def flash_weights(interleaved: Callable[..., Tensor]) -> Callable[[Any, Any], dict[str, Tensor]]:
    """`flash_weights(ours, theirs)`: the weights of our FLASH as those of theirs; copies the bias of theirs into ours."""

    def weights(ours: Any, theirs: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            ours.bias.table.copy_(table(theirs.rel_pos_bias(torch.zeros(CHUNK, CHUNK, dtype=torch.float64))))
        shared = weights_of(ours, [0, 2, 1, 3], interleaved)
        shared["qk_offset_scale.gamma"], shared["qk_offset_scale.beta"] = shared.pop("gamma"), shared.pop("beta")
        for kind in ("weight", "bias"):
            shared[f"to_out.{kind}"] = getattr(ours.to_output, kind)
        return {**theirs.state_dict(), **shared}

    return weights


@pytest.mark.parametrize("activation", ["relu2", "laplace"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 9])
def test_gau_is_that_of_flash_pytorch(
    length: int,
    causal: bool,
    activation: Any,
    peer: Callable[[str], Any],
    randomized: Callable[[nn.Module], Any],
    interleaved: Callable[..., Tensor],
) -> None:
    theirs = (
        peer("flash_pytorch")
        .GAU(dim=D_MODEL, query_key_dim=D_QK, causal=causal, laplace_attn_fn=activation == "laplace")
        .double()
    )
    ours = randomized(
        ForeignGAU(
            D_MODEL, d_qk=D_QK, causal=causal, rope=False, max_length=length, activation=activation, normalization="paper"
        )
    )
    with torch.no_grad():
        ours.bias.table.copy_(table(theirs.rel_pos_bias(torch.zeros(length, length, dtype=torch.float64))) / length)
    weights = weights_of(ours, [0, 1], interleaved)
    weights["offsetscale.gamma"], weights["offsetscale.beta"] = weights.pop("gamma"), weights.pop("beta")
    for kind in ("weight", "bias"):
        weights[f"to_out.0.{kind}"] = getattr(ours.to_output, kind)
    theirs.load_state_dict({**theirs.state_dict(), **weights})
    x = torch.randn(2, length, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-10, rtol=0)


@pytest.mark.parametrize("token_shift", [False, True])
@pytest.mark.parametrize("activation", ["relu2", "laplace"])
@pytest.mark.parametrize(("causal", "length"), [(False, CHUNK), (False, 3 * CHUNK), (True, 5), (True, 2 * CHUNK)])
def test_flash_is_that_of_flash_pytorch(
    causal: bool,
    length: int,
    activation: Any,
    token_shift: bool,
    peer: Callable[[str], Any],
    randomized: Callable[[nn.Module], Any],
    flash_weights: Callable[[Any, Any], dict[str, Tensor]],
) -> None:
    options: dict[str, Any] = {"rope": False, "activation": activation, "normalization": "paper", "token_shift": token_shift}
    ours = randomized(ForeignFLASH(D_MODEL, d_qk=D_QK, chunk_size=CHUNK, causal=causal, **options))
    theirs = (
        peer("flash_pytorch")
        .FLASH(
            dim=D_MODEL,
            group_size=CHUNK,
            query_key_dim=D_QK,
            causal=causal,
            laplace_attn_fn=activation == "laplace",
            shift_tokens=token_shift,
        )
        .double()
    )
    theirs.load_state_dict(flash_weights(ours, theirs))
    x = torch.randn(2, length, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-10, rtol=0)


@pytest.mark.parametrize(("task", "length"), [("clm", 2 * CHUNK), ("mlm", 4 * CHUNK)])
def test_a_model_of_flash_is_that_of_flash_pytorch(
    task: Any,
    length: int,
    peer: Callable[[str], Any],
    randomized: Callable[[nn.Module], Any],
    flash_weights: Callable[[Any, Any], dict[str, Tensor]],
) -> None:
    sizes = {"vocab_size": 30, "d_model": D_MODEL, "n_blocks": 2, "d_qk": D_QK, "chunk_size": CHUNK}
    model = randomized(lineartime.build("flash-tiny", task, norm="layernorm", normalization="paper", token_shift=True, **sizes))
    theirs = (
        peer("flash_pytorch")
        .FLASHTransformer(
            dim=D_MODEL,
            num_tokens=30,
            depth=2,
            group_size=CHUNK,
            query_key_dim=D_QK,
            causal=task == "clm",
            norm_type="layernorm",
            shift_tokens=True,
        )
        .double()
    )
    backbone = model.backbone
    weights = {
        "token_emb.weight": backbone.embedding.weight,
        "abs_pos_emb.scale": backbone.position.scale,
        "to_logits.0.weight": backbone.norm.weight,
        "to_logits.0.bias": backbone.norm.bias,
        "to_logits.1.weight": backbone.embedding.weight,
        "to_logits.1.bias": torch.zeros(30),
    }
    for i, block in enumerate(backbone.blocks):
        weights |= {f"layers.{i}.{name}": weight for name, weight in flash_weights(block.mixer, theirs.layers[i]).items()}
    theirs.load_state_dict({**theirs.state_dict(), **weights})
    ids = torch.randint(30, (2, length))
    torch.testing.assert_close(model(ids), theirs(ids), atol=1e-5, rtol=0)
