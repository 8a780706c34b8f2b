"""Mixed chunk attention and, without chunks, GAU's: whole sequences against the definition."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ops.cases import CASES, CHUNK, D_QK, NORMALIZATIONS, bias_of, maps_of, options_of, packing_of
from tests.pairs import every_pair
from torch import Tensor

from lineartime.layers import GAU, set_backend
from lineartime.ops import mixed_chunk
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.context import ContextGroup
from lineartime.ops.mixed_chunk import MixedChunkOptions, Scales, attend, attention_weights, reciprocal
from lineartime.ops.packing import Packing


def attended(packing: Packing, options: MixedChunkOptions, *maps: Tensor) -> Tensor:
    """The attention of q_quad, k_quad, q_lin, k_lin, v or, without chunks, q, k, v."""
    out, _ = attend(*(maps if len(maps) == 5 else (*maps[:2], None, None, maps[2])), packing, options)
    return out


@every_pair(
    case=CASES,
    chunk_size=[CHUNK, None],
    causal=[False, True],
    activation=ACTIVATIONS,
    normalization=NORMALIZATIONS,
    biased=[True, False],
    backend=["torch", "auto"],
)
def test_values_and_gradients_are_the_definition(
    case: str, chunk_size: int | None, causal: bool, activation: Any, normalization: Any, biased: bool, backend: Any,
    assert_same_function: Callable[..., None],
) -> None:  # fmt: skip
    packing = CASES[case]()
    causal, chunk_size = causal or packing.prefix is not None, CHUNK if normalization == "paper_sum" else chunk_size

    def run(chosen: Any, *inputs: Tensor) -> Tensor:
        maps, bias = (inputs[:-1], inputs[-1]) if biased else (inputs, None)
        options: dict[str, Any] = {"activation": activation, "normalization": normalization, "backend": chosen}
        return attended(packing, options_of(chunk_size, causal, bias, **options), *maps)

    inputs = [*maps_of(packing.count, chunk_size), *([bias_of(chunk_size)] if biased else [])]
    assert_same_function(lambda *x: run(backend, *x), lambda *x: run("oracle", *x), *inputs)


@pytest.mark.parametrize("backend", ["oracle", "torch"])
def test_definition_is_the_formula_of_the_paper(backend: Any) -> None:
    """By masks over all pairs: t sees the tokens of its chunk up to itself, and the chunks before."""
    q_quad, k_quad, q_lin, k_lin, v = maps_of(11)
    t, j = torch.arange(11)[:, None], torch.arange(11)
    near, far, distance = (j <= t) & (j // CHUNK == t // CHUNK), j // CHUNK < t // CHUNK, (j - t).clamp(1 - CHUNK, CHUNK - 1)
    bias = bias_of(CHUNK)
    weights = (q_quad @ k_quad.mT / math.sqrt(D_QK) + bias[distance + CHUNK - 1]).relu().square() * near
    expected = (weights / near.sum(1, keepdim=True)) @ v
    expected += (q_lin @ k_lin.mT * far / far.sum(1, keepdim=True).clamp(min=1)) @ v
    options = options_of(CHUNK, True, bias, backend=backend)
    found = attended(packing_of(1, 11), options, q_quad, k_quad, q_lin, k_lin, v)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["oracle", "torch"])
def test_softmax_with_prefixes_is_that_of_a_prefix_model(backend: Any) -> None:
    q, k, v = maps_of(4 * 14, None)
    packing, t, j = CASES["prefixes"](), torch.arange(14)[:, None], torch.arange(14)
    assert packing.prefix is not None
    found = attended(packing, options_of(None, True, activation="softmax", backend=backend), q, k, v)
    prefix = packing.prefix[:, None, None]
    exact = F.scaled_dot_product_attention(
        *(x.view(4, 14, -1) for x in (q, k, v)), attn_mask=(j <= t) | ((t < prefix) & (j < prefix))
    )
    torch.testing.assert_close(found.view_as(exact), exact, atol=1e-12, rtol=0)


def test_published_length_is_a_divisor_inside_the_square() -> None:
    q, v = torch.full((2, 1), 3.0), torch.ones(2, 1)
    for causal, longest, n in ((False, None, 2), (True, 6, 6), (True, None, 512)):
        scales = GAU(4, d_qk=2, causal=causal, normalization="paper", max_length=longest).scales()
        out = attended(packing_of(1, 2), MixedChunkOptions(None, causal, scales), q, q, v)
        torch.testing.assert_close(out, (9 / n) ** 2 * torch.tensor([[1.0 + (not causal)], [2.0]]))


def test_prefix_of_nothing_is_causal_attention_to_the_bit_and_one_of_everything_reads_both_ways() -> None:
    for chunk_size in (CHUNK, None):
        maps, bias = maps_of(28, chunk_size), bias_of(chunk_size)
        causal, both_ways = (
            attended(packing_of(2, 14), options_of(chunk_size, causal, bias), *maps) for causal in (True, False)
        )
        nothing, everything = (
            attended(packing_of(2, 14, prefix=[n, n]), options_of(chunk_size, True, bias), *maps) for n in (0, 14)
        )
        assert torch.equal(nothing, causal)
        torch.testing.assert_close(everything, both_ways, atol=1e-12, rtol=0)


@every_pair(case=["ragged", "left", "pack"], chunk_size=[CHUNK, None], dtype=[torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_its_inputs(case: str, chunk_size: int | None, dtype: torch.dtype) -> None:
    packing = CASES[case]()
    maps = maps_of(packing.count, chunk_size, dtype)
    out = attended(packing, options_of(chunk_size, True), *maps)
    exact = attended(packing, options_of(chunk_size, True, backend="oracle"), *(x.double() for x in maps))
    assert out.dtype == dtype
    assert (out - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_states_and_counts_accumulate_in_float32_also_under_autocast() -> None:
    # 1 + 1 + ... stops at 256 in bfloat16: the mean over 600 chunks of ones would come out as less than a half.
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        ones = torch.ones(600, 1, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = attended(packing_of(1, 600), options_of(1, True, d_qk=2), 0 * ones, ones, ones, ones, ones)
        assert out.dtype == torch.bfloat16
        assert out[-1].item() == 1.0


@every_pair(
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    chunk_size=[8, None],
    backend=["torch", "auto"],
    activation=ACTIVATIONS,
    case=["rows", "pack"],
)
def test_later_tokens_however_large_change_no_bit(
    dtype: torch.dtype, chunk_size: int | None, backend: Any, activation: Any, case: str
) -> None:
    """Scores that overflow once squared stand behind the mask."""
    packing = packing_of(1, 40) if case == "rows" else packing_of(1, 40, ends=[0, 3, 29, 40])
    options = options_of(chunk_size, True, bias_of(chunk_size, 40), activation=activation, backend=backend)
    maps, ends = maps_of(40, chunk_size, dtype), (21, 26)  # the first tokens of the second document, or of a row
    before = attended(packing, options, *maps)
    huge = torch.finfo(dtype).max ** 0.5 if dtype != torch.float16 else torch.finfo(dtype).max
    for end in ends:
        after = attended(packing, options, *(torch.where(torch.arange(40)[:, None] < end, x, huge * x.sign()) for x in maps))
        assert torch.equal(after[:end], before[:end])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_slice_of_a_sequence_reads_what_other_processes_hold(
    causal: bool, normalization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps, bias = [x.view(2, 4 * CHUNK, -1) for x in maps_of(8 * CHUNK)], bias_of(CHUNK)
    options = options_of(CHUNK, causal, bias, normalization=normalization)
    whole = attended(packing_of(2, 4 * CHUNK), replace(options, backend="oracle"), *(x.flatten(0, 1) for x in maps))
    k_lin, v = (x[:, : 2 * CHUNK] for x in maps[3:])

    def of_the_first(sums: Tensor, group: ContextGroup, reach: str) -> Tensor:
        assert reach == ("before" if causal else "others")
        return k_lin.mT @ v

    monkeypatch.setattr(mixed_chunk, "sum_elsewhere", of_the_first)
    second = packing_of(2, 2 * CHUNK, context=ContextGroup("", rank=1, size=2))
    part = attended(second, options, *(x[:, 2 * CHUNK :].flatten(0, 1) for x in maps))
    torch.testing.assert_close(part.view(2, 2 * CHUNK, -1), whole.view(2, 4 * CHUNK, -1)[:, 2 * CHUNK :], atol=1e-10, rtol=0)


# One row of weights ---------------------------------------------------------------------------------------------------


def weights(products: list[float], activation: str, visible: list[bool] | None = None) -> list[float]:
    hidden = None if visible is None else ~torch.tensor([visible])
    count = torch.tensor([len(products) if visible is None else max(1, sum(visible))])
    scales = Scales(0.5, reciprocal, reciprocal)
    return attention_weights(torch.tensor([products], dtype=torch.float64), hidden, count, None, activation, scales)[0].tolist()


def test_weights_by_hand() -> None:
    assert weights([4.0, -4.0], "relu2") == [2.0, 0.0]  # (4 / 2)^2 / 2 keys
    assert weights([4.0, 9.0], "relu2", [True, False]) == [4.0, 0.0]  # of which one is visible
    assert math.isclose(sum(weights([1.0, 2.0, 3.0], "softmax", [True, True, False])), 1.0)
    for activation in ACTIVATIONS:
        assert weights([1.0, 2.0], activation, [False, False]) == [0.0, 0.0]


def test_oracle_and_tiles_are_chosen_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, ran = GAU(8, d_qk=4), torch.randn(1, 5, 8), []
    monkeypatch.setattr(mixed_chunk.quadratic, "tiled", lambda inputs: (ran.append("tiled"), inputs.v)[1])
    monkeypatch.setattr(mixed_chunk.oracle, "attend", lambda *inputs: (ran.append("oracle"), inputs[4])[1])
    for backend in ("torch", "tiled", "auto", "oracle"):
        set_backend(layer, backend)
        layer(x)
    assert ran == ["tiled", "tiled", "oracle"]
