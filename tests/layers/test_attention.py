"""Softmax multi-head attention against its formula."""

import copy

import pytest
import torch
from tests.definitions import assert_same_function, noisy
from tests.pairs import every_pair
from torch import Tensor

from lineartime.layers import Attention
from lineartime.layers.attention import MANY_KEYS
from lineartime.ops import KVCache, rope


@every_pair(causal=[False, True], rotary=[False, True], normed=[False, True], length=[1, 3, 17])
def test_every_head_is_softmax_attention(causal: bool, rotary: bool, normed: bool, length: int) -> None:
    layer = noisy(Attention(16, n_heads=2, causal=causal, rope=rotary, qk_norm=normed).double())
    positions = torch.arange(length)

    def formula(x: Tensor) -> Tensor:
        q, k, v = layer.to_qkv(layer.norm(x)).split(16, -1)
        heads = []
        for part in (slice(0, 8), slice(8, 16)):
            maps = [q[..., part], k[..., part]]
            if normed:
                gains = (layer.q_norm.weight, layer.k_norm.weight)
                maps = [y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * g for y, g in zip(maps, gains, strict=True)]
            turned = (rope(y, positions) if rotary else y for y in maps)
            scores = torch.einsum("btf,bjf->btj", *turned) / 8**0.5
            if causal:
                scores = scores.masked_fill(positions > positions[:, None], -torch.inf)
            heads.append(scores.softmax(-1) @ v[..., part])
        out: Tensor = x + layer.to_output(torch.cat(heads, -1))
        return out

    assert_same_function(layer, formula, torch.randn(2, length, 16))


@pytest.mark.parametrize("length", [0, 1, MANY_KEYS - 2, MANY_KEYS + 9])
def test_token_of_a_stream_in_bf16_is_as_exact_as_all_tokens_at_once(length: int) -> None:
    """A single token of a long stream on a CPU has a form of its own: PyTorch's fused attention is slow there."""
    layer = Attention(64, n_heads=4, causal=True).to(torch.bfloat16)
    x = torch.randn(2, length + 1, 64, dtype=torch.bfloat16)
    exact = copy.deepcopy(layer).double()(x.double())[:, -1:] - x[:, -1:].double()
    state = layer.extend(x[:, :-1])[1]
    by_step, at_once = layer.extend(x[:, -1:], state)[0], layer(x)[:, -1:]
    errors = [(found.double() - x[:, -1:].double() - exact).abs().max() for found in (by_step, at_once)]
    assert errors[0] <= max(2 * errors[1], 2.0**-7)


def test_token_of_no_streams_in_bf16_is_no_output_however_many_keys_there_are() -> None:
    layer = Attention(8, n_heads=2, causal=True).to(torch.bfloat16)
    keys = torch.zeros(0, 2, MANY_KEYS, 4, dtype=torch.bfloat16)
    out, _ = layer.extend(torch.zeros(0, 1, 8, dtype=torch.bfloat16), KVCache(torch.zeros(0, dtype=torch.long), keys, keys))
    assert out.shape == (0, 1, 8)
