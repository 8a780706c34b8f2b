"""The variants of FLASH, each of which exchanges one part of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines.flash_cls import FLASHCLS, flash_cls_oracle
from lineartime.baselines.flash_first_to_all import FLASHFirstToAll, flash_first_to_all_oracle
from lineartime.baselines.flash_global import FLASHGlobal
from lineartime.baselines.flash_local import FLASHLocal
from lineartime.baselines.flash_overlapping import FLASHOverlapping, flash_overlapping_oracle
from lineartime.baselines.flash_parts import FLASHInParts
from lineartime.baselines.flash_weighted import FLASHWeighted, flash_weighted_oracle, weighted_summaries
from lineartime.layers import FLASH, GAU
from lineartime.ops.batch import cut_chunks
from lineartime.ops.mixed_chunk import mixed_chunk_attention_oracle
from lineartime.ops.mixed_chunk.chunked import summary_attention
from lineartime.ops.mixed_chunk.inputs import MixedChunkOptions

CHUNK = 4
LENGTHS = [1, 4, 5, 17]
lengths = pytest.mark.parametrize("length", LENGTHS)
directions = pytest.mark.parametrize("causal", [False, True])


def far_from_silent(layer: FLASH) -> FLASH:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def bias_of(layer: FLASHInParts) -> Tensor:
    bias = layer.chunk_bias(cut_chunks(torch.zeros(1, CHUNK), CHUNK))
    assert bias is not None
    return bias


def quadratic_part(layer: FLASHInParts, method: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """The quadratic part of a layer, or of a base of it, for one document: [T, s], [T, s], [T, e] -> [T, e]."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        chunks = cut_chunks(v[None], CHUNK)
        cut = (chunks.cut(x[None]) for x in (q, k, v))
        return chunks.join((method or type(layer).quadratic_part)(layer, *cut, chunks, bias_of(layer)))[0]

    return attend


@every_pair(causal=[False, True], length=LENGTHS, normalization=["count", "paper"])
def test_flash_is_the_sum_of_its_parts(causal: bool, length: int, normalization: Any) -> None:
    both = far_from_silent(FLASH(8, d_qk=4, chunk_size=CHUNK, causal=causal, normalization=normalization)).double()
    local = FLASHLocal(8, d_qk=4, chunk_size=CHUNK, causal=causal, normalization=normalization).double()
    across = FLASHGlobal(8, d_qk=4, chunk_size=CHUNK, causal=causal, normalization=normalization).double()
    weights = both.state_dict()
    local.load_state_dict({**weights, "gamma": both.gamma[:2], "beta": both.beta[:2]})
    shared = {name: value for name, value in weights.items() if not name.startswith("bias")}
    across.load_state_dict({**shared, "gamma": both.gamma[2:], "beta": both.beta[2:]})
    x = torch.randn(2, length, 8, dtype=torch.float64)
    # The residual and the bias of the output map are in both halves.
    torch.testing.assert_close(local(x) + across(x) - x - both.to_output.bias, both(x), atol=1e-10, rtol=0)


@lengths
def test_causal_flash_with_one_chunk_is_a_gau(length: int) -> None:
    flash = far_from_silent(FLASH(8, d_qk=4, chunk_size=17, causal=True)).double()
    gau = GAU(8, d_qk=4, causal=True, max_length=17).double()
    gau.load_state_dict({**flash.state_dict(), "gamma": flash.gamma[:2], "beta": flash.beta[:2]})
    x = torch.randn(2, length, 8, dtype=torch.float64)
    torch.testing.assert_close(flash(x), gau(x), atol=1e-10, rtol=0)


@every_pair(causal=[False, True], length=LENGTHS, activation=["relu2", "softmax"])
def test_overlapping_attention_is_the_definition(
    causal: bool, length: int, activation: Any, assert_same_function: Callable[..., None]
) -> None:
    layer = FLASHOverlapping(8, d_qk=4, chunk_size=CHUNK, causal=causal, activation=activation).double()
    bias = bias_of(layer)
    assert bias.shape == (CHUNK, 2 * CHUNK if causal else 3 * CHUNK)

    def oracle(*qkv: Tensor) -> Tensor:
        return flash_overlapping_oracle(*qkv, bias, chunk_size=CHUNK, causal=causal, activation=activation)

    assert_same_function(quadratic_part(layer), oracle, *(torch.randn(length, width) for width in (4, 4, 5)))


@every_pair(causal=[False, True], length=LENGTHS)
def test_weighted_summaries_are_the_definition(causal: bool, length: int, assert_same_function: Callable[..., None]) -> None:
    def fast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chunks = cut_chunks(v[None], CHUNK)
        return chunks.join(weighted_summaries(*(chunks.cut(x[None]) for x in (q, k, v)), chunks, causal=causal))[0]

    assert_same_function(
        fast,
        lambda q, k, v: flash_weighted_oracle(q, k, v, chunk_size=CHUNK, causal=causal),
        *(2 * torch.randn(length, width) for width in (4, 4, 5)),
    )


@directions
@pytest.mark.parametrize("normalization", ["count", "paper"])
def test_equal_weights_of_summaries_are_the_linear_part_of_flash(causal: bool, normalization: Any) -> None:
    """Queries and keys whose chunks have means of zero weigh all summaries equally, whatever the summaries hold."""
    chunks = cut_chunks(torch.randn(2, 4 * CHUNK, 5), CHUNK)
    half = torch.randn(2, 2, 4, CHUNK // 2, 4)
    q, k = torch.cat([half, -half], -2)
    v = torch.randn(2, 4, CHUNK, 5)
    options = MixedChunkOptions(CHUNK, causal=causal, normalization=normalization)
    plain = summary_attention(q, k, v, chunks, options, reach="before" if causal else "all")
    size = CHUNK if normalization == "paper" else None
    torch.testing.assert_close(weighted_summaries(q, k, v, chunks, causal=causal, published_size=size), plain)
    assert plain.abs().max() > 0.1


def test_published_divisor_of_summaries_counts_a_chunk_as_full() -> None:
    chunks = cut_chunks(torch.randn(1, CHUNK - 1, 5), CHUNK)
    q, k, v = (chunks.cut(torch.randn(1, CHUNK - 1, width)) for width in (4, 4, 5))
    counted = weighted_summaries(q, k, v, chunks, causal=False)
    published = weighted_summaries(q, k, v, chunks, causal=False, published_size=float(CHUNK))
    torch.testing.assert_close(published * CHUNK, counted * (CHUNK - 1))


@pytest.mark.parametrize("variant", [FLASHCLS, FLASHFirstToAll])
@lengths
def test_first_tokens_attend_with_softmax_and_others_as_before(
    length: int, variant: type[FLASHInParts], assert_same_function: Callable[..., None]
) -> None:
    layer = variant(8, d_qk=4, chunk_size=CHUNK).double()
    bias = bias_of(layer)

    def oracle(*qkv: Tensor) -> Tensor:
        out = quadratic_part(layer, FLASHInParts.quadratic_part)(*qkv)
        if variant is FLASHCLS:
            changed = flash_cls_oracle(*qkv, bias, chunk_size=CHUNK)
        else:
            changed = flash_first_to_all_oracle(*qkv, chunk_size=CHUNK)
        return torch.stack([changed.get(t, out[t]) for t in range(length)])

    assert_same_function(quadratic_part(layer), oracle, *(torch.randn(length, width) for width in (4, 4, 5)))


@directions
def test_flash_in_parts_is_flash(causal: bool) -> None:
    whole = far_from_silent(FLASH(8, d_qk=4, chunk_size=CHUNK, causal=causal))
    parts = FLASHInParts(8, d_qk=4, chunk_size=CHUNK, causal=causal)
    parts.load_state_dict(whole.state_dict())
    x, mask = torch.randn(2, 17, 8), torch.rand(2, 17) > 0.3
    torch.testing.assert_close(parts(x, mask=mask), whole(x, mask=mask))


@every_pair(causal=[False, True], length=LENGTHS)
def test_each_part_alone_is_the_definition_without_the_other(
    causal: bool, length: int, assert_same_function: Callable[..., None]
) -> None:
    local = FLASHLocal(8, d_qk=4, chunk_size=CHUNK, causal=causal, relative_bias=False).double()
    across = FLASHGlobal(8, d_qk=4, chunk_size=CHUNK, causal=causal).double()

    def alone(layer: FLASHInParts) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            chunks = cut_chunks(v, CHUNK)
            return chunks.join(layer.attend_chunks([chunks.cut(q), chunks.cut(k)], chunks.cut(v), chunks, None))

        return attend

    def oracle(*x: Tensor) -> Tensor:
        return mixed_chunk_attention_oracle(*x, chunk_size=CHUNK, causal=causal)

    inputs = [torch.randn(2, length, width) for width in (4, 4, 5)]
    # relu(0)^2 is zero, and so is a linear query of zero.
    assert_same_function(alone(local), lambda q, k, v: oracle(q, k, 0 * q, k, v), *inputs)
    assert_same_function(alone(across), lambda q, k, v: oracle(0 * q, k, q, k, v), *inputs)


@pytest.mark.parametrize("variant", [FLASHOverlapping, FLASHWeighted, FLASHFirstToAll, FLASHCLS, FLASHLocal])
def test_documents_of_a_pack_cannot_harm_each_other(variant: type[FLASHInParts]) -> None:
    layer, x = variant(8, d_qk=4, chunk_size=CHUNK), torch.randn(1, 20, 8)
    broken = x.clone()
    broken[:, 10:] = torch.inf
    ends = torch.tensor([0, 10, 20])
    torch.testing.assert_close(layer(broken, cu_seqlens=ends)[:, :10], layer(x, cu_seqlens=ends)[:, :10])
