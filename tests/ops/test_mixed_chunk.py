"""FLASH's attention: the chunked form against the definition.

C = 4 here, so that lengths around the chunk size and several chunks stay cheap.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.ops import mixed_chunk_attention, mixed_chunk_attention_oracle, quadratic_attention
from lineartime.ops.activations import ACTIVATIONS
from lineartime.ops.batch import Needs
from lineartime.ops.context import ContextGroup
from lineartime.ops.make_batch import make_batch
from lineartime.ops.mixed_chunk import chunked, reference
from lineartime.ops.mixed_chunk.inputs import Heads, MixedChunkOptions

CHUNK, D_QK, D_VALUE = 4, 6, 5
LENGTHS = [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
MASKS = ["none", "right", "left", "holes", "all padding"]


def make_inputs(batch: int, length: int, dtype: torch.dtype = torch.float64, grad: bool = False) -> tuple[Tensor, ...]:
    widths = (D_QK, D_QK, D_QK, D_QK, D_VALUE)
    return tuple(torch.randn(batch, length, width, dtype=dtype).requires_grad_(grad) for width in widths)


def make_mask(kind: str, batch: int, length: int) -> Tensor | None:
    tokens = torch.arange(length).expand(batch, -1)
    padding = torch.arange(batch)[:, None] * 3  # row 0 is full, row 1 lacks 3 tokens, ...
    return {
        "none": None,
        "right": tokens < length - padding,
        "left": tokens >= padding,
        "holes": torch.rand(batch, length) > 0.4,
        "all padding": (tokens >= 0) & (torch.arange(batch)[:, None] > 0),
    }[kind]


def bias_() -> Tensor:
    return torch.randn(CHUNK, CHUNK, dtype=torch.float64)


@every_pair(length=LENGTHS, causal=[False, True], mask_kind=MASKS)
def test_chunked_form_is_the_definition_under_every_mask(length: int, causal: bool, mask_kind: str) -> None:
    inputs = make_inputs(3, length)
    options: dict[str, Any] = {"chunk_size": CHUNK, "causal": causal, "bias": bias_(), "mask": make_mask(mask_kind, 3, length)}
    torch.testing.assert_close(
        mixed_chunk_attention(*inputs, **options), mixed_chunk_attention_oracle(*inputs, **options), atol=1e-10, rtol=0
    )


@every_pair(length=LENGTHS, causal=[False, True], activation=ACTIVATIONS, normalization=["count", "paper", "paper_sum"])
def test_chunked_form_is_the_definition_for_every_activation_and_normalization(
    length: int, causal: bool, activation: Any, normalization: Any
) -> None:
    inputs = make_inputs(2, length)
    options: dict[str, Any] = {"chunk_size": CHUNK, "causal": causal, "bias": bias_(), "mask": make_mask("right", 2, length)}
    options |= {"activation": activation, "normalization": normalization}
    torch.testing.assert_close(
        mixed_chunk_attention(*inputs, **options), mixed_chunk_attention_oracle(*inputs, **options), atol=1e-10, rtol=0
    )


@every_pair(
    ends=[[0, 4, 4, 5, 17], [0, 0, 1, 2, 3, 16, 17]],
    causal=[False, True],
    normalization=["count", "paper", "paper_sum"],
    padded=[False, True],
)
def test_packed_documents_are_the_definition(ends: list[int], causal: bool, normalization: Any, padded: bool) -> None:
    inputs = make_inputs(1, 17)
    mask = torch.rand(1, 17) > 0.3 if padded else None
    options: dict[str, Any] = {"chunk_size": CHUNK, "causal": causal, "bias": bias_(), "normalization": normalization}
    options |= {"mask": mask, "cu_seqlens": torch.tensor(ends)}
    torch.testing.assert_close(
        mixed_chunk_attention(*inputs, **options), mixed_chunk_attention_oracle(*inputs, **options), atol=1e-10, rtol=0
    )


@every_pair(length=[1, CHUNK, 3 * CHUNK + 5], causal=[False, True], case=["mask", "pack", "plain"])
def test_gradients_are_those_of_the_definition(length: int, causal: bool, case: str) -> None:
    batch = 1 if case == "pack" else 2
    inputs, bias = make_inputs(batch, length, grad=True), bias_().requires_grad_()
    options: dict[str, Any] = {"chunk_size": CHUNK, "causal": causal}
    if case == "mask":
        options["mask"] = make_mask("right", batch, length)
    if case == "pack":
        options["cu_seqlens"] = torch.tensor([0, length // 2, length])
    direction = torch.randn(batch, length, D_VALUE, dtype=torch.float64)

    def gradients(attention: Any) -> tuple[Tensor, ...]:
        out = (attention(*inputs, bias=bias, **options) * direction).sum()
        return torch.autograd.grad(out, (*inputs, bias), materialize_grads=True)

    for fast, exact in zip(gradients(mixed_chunk_attention), gradients(mixed_chunk_attention_oracle), strict=True):
        torch.testing.assert_close(fast, exact, atol=1e-10, rtol=0)


def test_one_chunk_without_linear_part_is_quadratic_attention() -> None:
    q, k, q_lin, k_lin, v = make_inputs(2, CHUNK)
    mixed = mixed_chunk_attention(q, k, 0 * q_lin, k_lin, v, chunk_size=CHUNK)
    torch.testing.assert_close(mixed, quadratic_attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_its_inputs(dtype: torch.dtype) -> None:
    inputs = make_inputs(2, 50, torch.float32)
    rounded = [x.to(dtype) for x in inputs]
    out = mixed_chunk_attention(*rounded, chunk_size=CHUNK, causal=True)
    exact = mixed_chunk_attention_oracle(*(x.double() for x in rounded), chunk_size=CHUNK, causal=True)
    assert out.dtype == dtype
    assert (out - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_states_and_counts_accumulate_in_float32() -> None:
    # 1 + 1 + ... stops at 256 in bfloat16: the mean over 600 chunks of ones would come out as less than a half.
    ones = torch.ones(1, 600, 1, dtype=torch.bfloat16)
    out = mixed_chunk_attention(0 * ones, ones, ones, ones, ones, chunk_size=1, causal=True)
    assert out[0, -1].item() == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"bias": torch.zeros(3, 3)}, r"bias has shape \[3, 3\], but must be \[C, C\] = \[4, 4\]"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, r"mask has shape \[4, 4\], but must be \[B, T\] = \[1, 4\]"),
        ({"k_lin": torch.zeros(1, 5, D_QK)}, r"k_lin has shape \[1, 5, 6\], but must be \[B, T, s\] = \[1, 4, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens is \[0, 3\], but must be nondecreasing from 0 to the 4 tokens"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = dict(zip(("q_quad", "k_quad", "q_lin", "k_lin", "v"), make_inputs(1, 4), strict=True))
    with pytest.raises(ValueError, match=message):
        mixed_chunk_attention(**{**inputs, "chunk_size": CHUNK, **change})
    with pytest.raises(ValueError, match="packs documents into one row, but the batch has 2 rows"):
        mixed_chunk_attention(*make_inputs(2, 4), chunk_size=CHUNK, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalization", ["count", "paper"])
@pytest.mark.parametrize("form", [chunked, reference])
def test_divisors_count_tokens_that_other_processes_hold(causal: bool, normalization: Any, form: ModuleType) -> None:
    inputs = make_inputs(2, 4 * CHUNK)
    options = MixedChunkOptions(CHUNK, causal, normalization=normalization)
    needs = Needs(CHUNK)
    here, there = Heads(*(x[:, 2 * CHUNK :] for x in inputs)), Heads(*(x[:, : 2 * CHUNK] for x in inputs))
    second = make_batch(here.v.shape, device=here.v.device, needs=needs, context=ContextGroup("", rank=1, size=2))
    whole = form.attend(Heads(*inputs), None, make_batch((2, 4 * CHUNK), device=here.v.device, needs=needs), options)
    part = form.attend(here, None, second, options)
    before = torch.arange(2 * CHUNK) // CHUNK * CHUNK if causal else torch.tensor([2 * CHUNK])
    read = here.q_lin @ (there.k_lin.mT @ there.v) / (2 * CHUNK + before)[:, None]
    torch.testing.assert_close(part + read, whole[:, 2 * CHUNK :], atol=1e-10, rtol=0)
