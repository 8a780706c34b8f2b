"""Linear attentions and efficient attention: the forms of their sums, rotated features, and numbers far from one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.baselines import test_definitions as definitions
from tests.definitions import assert_same_function
from tests.pairs import every_pair
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lineartime.baselines import Efficient, LinearELU, LinearTaylor, Performer
from lineartime.baselines.kernel_attention import KernelAttention
from lineartime.ops.packing import describe
from lineartime.ops.positions import rope

LAYERS: list[Callable[..., KernelAttention]] = [Performer, partial(Performer, causal_sums="matmul"), LinearELU, LinearTaylor]


def efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return Efficient(q.shape[-1], n_heads=1, causal=causal).attend(q[None, None], k[None, None], v[None, None], None)[0, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_sums_beyond_half_precision_are_those_of_float32(causal: bool) -> None:
    layer = LinearELU(16, n_heads=1, causal=causal, rope=False)
    q, v = (8 * torch.rand(4000, 1, 16)).half(), torch.randn(4000, 1, 16).half()
    packing = layer.describe((1, 4000), device=q.device)
    found, expected = (layer.attend_heads((q, q, v), packing, None)[0] for q, v in ((q, v), (q.float(), v.float())))
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("form", ["chunked", "prefix"])
def test_states_accumulate_in_float32(form: Any) -> None:
    # 1 + 1 + ... stops at 256 in bfloat16, which would make the mean of ones larger than one.
    ones = torch.ones(1, 1, 100_000, 1, dtype=torch.bfloat16)
    out = Performer(1, n_heads=1, causal=True, rope=False, causal_sums=form).attend(ones, ones, ones, None)
    assert out[..., -1, :].item() == pytest.approx(1, abs=0.01)


def test_chunked_form_stores_no_state_for_every_token() -> None:
    # With 64 x 65 numbers for each of 4,096 tokens a gradient would need to keep 68 MB for each head; chunks keep 1/128 of it.
    saved: list[int] = []

    def count(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    q, k, v = (torch.rand(1, 1, 4096, 64, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        LinearELU(64, n_heads=1, causal=True).attend(q, k, v, None)
    assert sum(saved) < 4096 * 64 * 65 / 2


def test_performer_with_matmul_sums_forms_all_products_and_none_with_prefix_sums() -> None:
    operations = {}
    for causal_sums in ("prefix", "matmul"):
        layer = Performer(8, n_heads=1, causal=True, causal_sums=causal_sums)
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(1, 100, 8))
        operations[causal_sums] = counter.get_total_flops()
    assert operations["matmul"] - operations["prefix"] > 2 * 100 * 100 * 8
    with pytest.raises(ValueError, match="causal_sums is 'scan', but must be one of 'prefix', 'matmul', 'chunked'"):
        Performer(8, n_heads=1, causal_sums="scan")  # type: ignore[arg-type]


@every_pair(causal=[False, True], length=[1, 5, 130])
def test_efficient_attention_with_rotated_features_is_the_definition(causal: bool, length: int) -> None:
    layer = Efficient(4, n_heads=1, causal=causal, rotated="features")
    packing = describe((1, length), device=torch.device("cpu"))

    def fast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (x.transpose(0, 1)[None] for x in layer.rotate(q[:, None], k[:, None], packing))
        return layer.attend(q, k, v[None, None], None)[0, 0]

    assert_same_function(fast, partial(definitions.efficient, layer, 0), *(torch.randn(length, 4) for _ in range(3)))


@every_pair(layer=LAYERS, causal=[False, True])
def test_rotated_features_weigh_values_and_plain_ones_normalise(layer: Callable[..., KernelAttention], causal: bool) -> None:
    """RoFormer, equation 19, from the formula."""
    mixer = layer(4, n_heads=1, causal=causal, rotated="features").double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 13, 4, dtype=torch.float64)
    q, k, v = mixer.to_qkv(mixer.norm(x))[0].chunk(3, -1)
    q, k = mixer.features(q), mixer.features(k)
    constant = q[:, : q.shape[1] % 2], k[:, : k.shape[1] % 2]  # of a Taylor series
    turned_q, turned_k = (
        torch.cat([one, rope(features[:, one.shape[1] :], torch.arange(13))], -1)
        for one, features in zip(constant, (q, k), strict=True)
    )
    seen = torch.ones(13, 13).tril() if causal else 1
    out = (turned_q @ turned_k.mT * seen) @ v / (q @ k.mT * seen).sum(-1, keepdim=True)
    torch.testing.assert_close(mixer(x)[0], x[0] + mixer.to_output(out))


@pytest.mark.parametrize("step", [20.0, 2000.0])
def test_keys_far_larger_than_those_before_change_no_earlier_output(step: float) -> None:
    # A maximum subtracted from a whole chunk would leave nothing of what comes before the largest key.
    q, k, v = (torch.randn(40, 4) for _ in range(3))
    larger = k.clone()
    larger[25:] += step
    fast = efficient(q, larger, v, causal=True)
    torch.testing.assert_close(fast[:25], efficient(q[:25], k[:25], v[:25], causal=True))
    exact = definitions.efficient(Efficient(4, n_heads=1, causal=True), 0, *(x.double() for x in (q, larger, v)))
    torch.testing.assert_close(fast.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_grow_by_thousands_neither_overflow_nor_vanish(causal: bool) -> None:
    k = torch.linspace(-1000, 1000, 300)[:, None].expand(-1, 4)
    q, v = torch.randn(300, 4), torch.randn(300, 4)
    exact = definitions.efficient(Efficient(4, n_heads=1, causal=causal), 0, q.double(), k.double(), v.double())
    torch.testing.assert_close(efficient(q, k, v, causal=causal).double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_similarities_close_to_zero_still_make_a_mean(causal: bool) -> None:
    # Every feature of elu(-12) + 1 is 6e-6, and their products far below what is often added to the denominator.
    x = torch.full((1, 1, 20, 4), -12.0)
    out = LinearELU(4, n_heads=1, causal=causal).attend(x, x, torch.ones(1, 1, 20, 4), None)
    torch.testing.assert_close(out, torch.ones_like(out))


@torch.no_grad()
def test_token_that_is_padding_leaves_its_stream_where_it_is() -> None:
    layer, x = LinearELU(4, n_heads=1, causal=True), torch.randn(2, 3, 4)
    _, state = layer.extend(x[:, :2])
    _, state = layer.extend(x[:, 2:], state, torch.tensor([[0], [1]]))
    assert state.position.tolist() == [2, 3]
    torch.testing.assert_close(layer.extend(x[:, 2:], state)[0][0], layer(x)[0, 2:])
