"""The variants of FLASH, each of which exchanges one part of it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.definitions import assert_same_function, noisy
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines import FLASHCLS, FLASHFirstToAll, FLASHGlobal, FLASHLocal, FLASHOverlapping, FLASHWeighted
from lineartime.layers import FLASH
from lineartime.ops import Packing, attend, describe, oracle

CHUNK = 4
LENGTHS = [1, 4, 5, 17]


def one_document(v: Tensor) -> Packing:
    return describe((1, len(v)), device=v.device)


def attended(layer: FLASH) -> Callable[..., Tensor]:
    """The attention of a layer for one document, of quadratic and linear queries and keys, and values."""
    return lambda *inputs: layer.attend(inputs[:-1], inputs[-1], one_document(inputs[-1]), None)[0]


def part_of_flash(layer: FLASH, v: Tensor, near: Any = (None, None), far: Any = (None, None)) -> Tensor:
    """The definition of one part of FLASH, of its queries and keys."""
    return oracle.of_document(*near, *far, v, layer.options(one_document(v)))


def inputs_of(length: int) -> list[Tensor]:
    return [torch.randn(length, width) for width in (4, 4, 4, 4, 5)]


@every_pair(causal=[False, True], length=LENGTHS, activation=["relu2", "softmax"])
def test_overlapping_attention_is_the_definition(causal: bool, length: int, activation: Any) -> None:
    layer = noisy(FLASHOverlapping(8, d_qk=4, chunk_size=CHUNK, causal=causal, activation=activation).double())
    bias = layer.bias(2 * CHUNK)

    def definition(q: Tensor, k: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor) -> Tensor:
        near = []
        for t in range(length):
            own = [j for j in range(length) if abs(j // CHUNK - t // CHUNK) <= 1 and (j <= t or not causal)]
            scores = k[own] @ q[t] / q.shape[-1] ** 0.5 + bias[[j - t + 2 * CHUNK - 1 for j in own]]
            weights = scores.softmax(0) if activation == "softmax" else scores.relu().square() / len(own)
            near.append(weights @ v[own])
        return torch.stack(near) + part_of_flash(layer, v, far=(q_lin, k_lin))

    assert_same_function(attended(layer), definition, *inputs_of(length))


@every_pair(causal=[False, True], length=LENGTHS)
def test_weighted_summaries_are_the_definition(causal: bool, length: int) -> None:
    layer = noisy(FLASHWeighted(8, d_qk=4, chunk_size=CHUNK, causal=causal).double())

    def definition(q: Tensor, k: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor) -> Tensor:
        q_bar, k_bar = ([x.mean(0) for x in each.split(CHUNK)] for each in (q_lin, k_lin))
        summaries = [x.mT @ y / len(y) for x, y in zip(k_lin.split(CHUNK), v.split(CHUNK), strict=True)]
        sizes, far = [len(x) for x in v.split(CHUNK)], []
        for t in range(length):
            reach = range(t // CHUNK if causal else len(sizes))
            query = q_bar[t // CHUNK - causal]
            scores = [query @ k_bar[h] / q.shape[-1] ** 0.5 + math.log(sizes[h]) for h in reach]
            weights = torch.stack(scores).softmax(0) if reach else []
            far.append(q_lin[t] @ sum((w * summaries[h] for w, h in zip(weights, reach, strict=True)), 0 * summaries[0]))
        return torch.stack(far) + part_of_flash(layer, v, near=(q, k))

    assert_same_function(attended(layer), definition, *(2 * x for x in inputs_of(length)))


@pytest.mark.parametrize("causal", [False, True])
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
@pytest.mark.parametrize("length", LENGTHS)
def test_first_tokens_attend_with_softmax_and_others_as_before(length: int, variant: type[FLASH]) -> None:
    layer = noisy(variant(8, d_qk=4, chunk_size=CHUNK).double())
    bias = layer.bias(CHUNK)

    def definition(q: Tensor, k: Tensor, q_lin: Tensor, k_lin: Tensor, v: Tensor) -> Tensor:
        near, scores = part_of_flash(layer, v, near=(q, k)), q @ k.mT / q.shape[-1] ** 0.5
        if variant is FLASHCLS:
            changed = {0: (scores[0, :CHUNK] + bias[CHUNK - 1 :][:length]).softmax(0) @ v[:CHUNK]}
        else:
            changed = {t: scores[t].softmax(0) @ v for t in range(0, length, CHUNK)}
        return torch.stack([changed.get(t, near[t]) for t in range(length)]) + part_of_flash(layer, v, far=(q_lin, k_lin))

    assert_same_function(attended(layer), definition, *inputs_of(length))


@every_pair(variant=[FLASHLocal, FLASHGlobal], causal=[False, True], length=LENGTHS, normalization=["count", "paper"])
def test_each_part_alone_is_the_definition_without_the_other(
    variant: Any, causal: bool, length: int, normalization: str
) -> None:
    layer = noisy(variant(8, d_qk=4, chunk_size=CHUNK, causal=causal, normalization=normalization).double())

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return part_of_flash(layer, v, **{"near" if variant is FLASHLocal else "far": (q, k)})

    assert_same_function(attended(layer), definition, *inputs_of(length)[2:])


@pytest.mark.parametrize("variant", [FLASHOverlapping, FLASHWeighted, FLASHFirstToAll, FLASHCLS, FLASHLocal])
def test_documents_of_a_pack_cannot_harm_each_other(variant: type[FLASH]) -> None:
    layer, x = variant(8, d_qk=4, chunk_size=CHUNK), torch.randn(1, 20, 8)
    broken = x.clone()
    broken[:, 10:] = torch.inf
    ends = torch.tensor([0, 10, 20])
    torch.testing.assert_close(layer(broken, cu_seqlens=ends)[:, :10], layer(x, cu_seqlens=ends)[:, :10])
