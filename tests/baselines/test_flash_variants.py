"""The variants of FLASH, each of which exchanges one part of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines import FLASHCLS, FLASHFirstToAll, FLASHGlobal, FLASHLocal, FLASHOverlapping, FLASHWeighted
from lineartime.baselines import flash_variants as variants
from lineartime.layers import FLASH, GAU
from lineartime.ops import Packing, attend, describe, oracle

CHUNK = 4
LENGTHS = [1, 4, 5, 17]
lengths = pytest.mark.parametrize("length", LENGTHS)
directions = pytest.mark.parametrize("causal", [False, True])


def one_document(v: Tensor) -> Packing:
    return describe((1, len(v)), device=v.device)


def quadratic_part(layer: FLASH) -> Callable[..., Tensor]:
    """The quadratic part of a layer for one document: [T, s], [T, s], [T, e] -> [T, e]."""
    return lambda q, k, v: layer.attend([q, k, 0 * q, k], v, one_document(v), None)[0]


@lengths
def test_causal_flash_with_one_chunk_is_a_gau(length: int) -> None:
    flash = FLASH(8, d_qk=4, chunk_size=17, causal=True).double()
    for parameter in flash.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    gau = GAU(8, d_qk=4, causal=True, max_length=17).double()
    gau.load_state_dict({**flash.state_dict(), "gamma": flash.gamma[:2], "beta": flash.beta[:2]})
    x = torch.randn(2, length, 8, dtype=torch.float64)
    torch.testing.assert_close(flash(x), gau(x), atol=1e-10, rtol=0)


@every_pair(causal=[False, True], length=LENGTHS, activation=["relu2", "softmax"])
def test_overlapping_attention_is_the_definition(
    causal: bool, length: int, activation: Any, assert_same_function: Callable[..., None]
) -> None:
    layer = FLASHOverlapping(8, d_qk=4, chunk_size=CHUNK, causal=causal, activation=activation).double()
    assert layer.bias is not None
    bias = layer.bias(2 * CHUNK)

    def oracle(*qkv: Tensor) -> Tensor:
        return variants.flash_overlapping_oracle(*qkv, bias, chunk_size=CHUNK, causal=causal, activation=activation)

    assert_same_function(quadratic_part(layer), oracle, *(torch.randn(length, width) for width in (4, 4, 5)))


@every_pair(causal=[False, True], length=LENGTHS)
def test_weighted_summaries_are_the_definition(causal: bool, length: int, assert_same_function: Callable[..., None]) -> None:
    layer = FLASHWeighted(8, d_qk=4, chunk_size=CHUNK, causal=causal)
    assert_same_function(
        lambda q, k, v: layer.attend_across(q, k, v, one_document(v), None)[0],
        lambda q, k, v: variants.flash_weighted_oracle(q, k, v, chunk_size=CHUNK, causal=causal),
        *(2 * torch.randn(length, width) for width in (4, 4, 5)),
    )


@directions
@pytest.mark.parametrize("normalization", ["count", "paper"])
def test_equal_weights_of_summaries_are_the_linear_part_of_flash(causal: bool, normalization: Any) -> None:
    """Queries and keys whose chunks have means of zero weigh all summaries equally, whatever the summaries hold."""
    layer = FLASHWeighted(8, d_qk=4, chunk_size=CHUNK, causal=causal, normalization=normalization)
    half = torch.randn(2, 8, CHUNK // 2, 4)
    q, k = torch.cat([half, -half], -2).flatten(1, 2)
    v, packing = torch.randn(8 * CHUNK, 5), describe((2, 4 * CHUNK), device=q.device)
    plain, _ = attend(None, None, q, k, v, packing, layer.options(packing))
    torch.testing.assert_close(layer.attend_across(q, k, v, packing, None)[0], plain)
    assert plain.abs().max() > 0.1


def test_published_divisor_of_summaries_counts_a_chunk_as_full() -> None:
    q, k, v = (torch.randn(CHUNK - 1, width) for width in (4, 4, 5))
    layers = (FLASHWeighted(8, d_qk=4, chunk_size=CHUNK, normalization=normalization) for normalization in ("count", "paper"))
    counted, published = (layer.attend_across(q, k, v, one_document(v), None)[0] for layer in layers)
    torch.testing.assert_close(published * CHUNK, counted * (CHUNK - 1))


@pytest.mark.parametrize("variant", [FLASHCLS, FLASHFirstToAll])
@lengths
def test_first_tokens_attend_with_softmax_and_others_as_before(
    length: int, variant: type[FLASH], assert_same_function: Callable[..., None]
) -> None:
    layer = variant(8, d_qk=4, chunk_size=CHUNK).double()
    assert layer.bias is not None
    bias = layer.bias(CHUNK)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = oracle.of_document(q, k, None, None, v, layer.options(one_document(v)))
        if variant is FLASHCLS:
            changed = variants.flash_cls_oracle(q, k, v, bias, chunk_size=CHUNK)
        else:
            changed = variants.flash_first_to_all_oracle(q, k, v, chunk_size=CHUNK)
        return torch.stack([changed.get(t, out[t]) for t in range(length)])

    assert_same_function(quadratic_part(layer), definition, *(torch.randn(length, width) for width in (4, 4, 5)))


@every_pair(variant=[FLASHLocal, FLASHGlobal], causal=[False, True], length=LENGTHS, normalization=["count", "paper"])
def test_each_part_alone_is_the_definition_without_the_other(
    variant: Any, causal: bool, length: int, normalization: str, assert_same_function: Callable[..., None]
) -> None:
    layer = variant(8, d_qk=4, chunk_size=CHUNK, causal=causal, normalization=normalization).double()

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        maps = (q, k, None, None) if variant is FLASHLocal else (None, None, q, k)
        return oracle.of_document(*maps, v, layer.options(one_document(v)))

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.as_tensor(layer.attend([q, k], v, one_document(v), None)[0])

    assert_same_function(alone, definition, *(torch.randn(length, width) for width in (4, 4, 5)))


@pytest.mark.parametrize("variant", [FLASHOverlapping, FLASHWeighted, FLASHFirstToAll, FLASHCLS, FLASHLocal])
def test_documents_of_a_pack_cannot_harm_each_other(variant: type[FLASH]) -> None:
    layer, x = variant(8, d_qk=4, chunk_size=CHUNK), torch.randn(1, 20, 8)
    broken = x.clone()
    broken[:, 10:] = torch.inf
    ends = torch.tensor([0, 10, 20])
    torch.testing.assert_close(layer(broken, cu_seqlens=ends)[:, :10], layer(x, cu_seqlens=ends)[:, :10])
