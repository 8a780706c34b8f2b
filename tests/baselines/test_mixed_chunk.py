"""Mixed chunk attention as a scheme: every local part with every feature map, against the definition."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines.mixed_chunk import MixedChunk, mixed_chunk_scheme_oracle
from lineartime.layers import Attention

CHUNK, LONGEST = 4, 40
SIMILARITIES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "relu": lambda q, k, _: (q.clamp(min=0) + 1e-3) @ (k.clamp(min=0) + 1e-3),
    "elu": lambda q, k, _: torch.where(q > 0, q + 1, q.exp()) @ torch.where(k > 0, k + 1, k.exp()),
    "cos": lambda q, k, distance: q.clamp(min=0) @ k.clamp(min=0) * math.cos(math.pi / 2 * distance / LONGEST),
}
PARTS = list(product(("own", "overlapping"), SIMILARITIES))
every_pair_of_parts = pytest.mark.parametrize(("local", "features"), PARTS)


def build(local: str, features: str, **options: bool) -> MixedChunk:
    parts = {"local": local, "features": features, "max_length": LONGEST}
    return MixedChunk(12, n_heads=2, chunk_size=CHUNK, **parts, **options)  # type: ignore[arg-type]


@every_pair(local=["own", "overlapping"], features=list(SIMILARITIES), causal=[False, True], length=[1, 4, 9, 17])
def test_values_and_gradients_are_those_of_the_definition(
    local: str, features: str, causal: bool, length: int, assert_heads_are_the_definition: Callable[..., None]
) -> None:
    layer, reach = build(local, features, causal=causal), 1 if local == "overlapping" else 0
    similarity = SIMILARITIES[features]
    assert_heads_are_the_definition(
        layer.attend,
        lambda _, q, k, v: mixed_chunk_scheme_oracle(q, k, v, similarity, chunk_size=CHUNK, reach=reach, causal=causal),
        # Some feature of every query and key is positive: a query that is similar to no key has no mean.
        *(torch.randn(2, 2, length, 6) + torch.tensor([5.0, 0, 0, 0, 0, 0]) for _ in range(3)),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_one_chunk_is_softmax_attention_and_nothing_more(causal: bool) -> None:
    mixer, plain = MixedChunk(16, n_heads=2, chunk_size=8, causal=causal), Attention(16, n_heads=2, causal=causal)
    mixer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 8, 16)
    torch.testing.assert_close(mixer(x), plain(x))


@every_pair_of_parts
def test_memory_of_a_stream_is_constant(local: str, features: str) -> None:
    layer = build(local, features, causal=True)
    state = layer.init_state(1)
    shapes = [part.shape for part in state.tensors()]
    assert shapes[2] == (1, 2, CHUNK * (2 if local == "overlapping" else 1), 6)
    _, state = layer.extend(torch.randn(1, 30, 12), state)
    assert [part.shape for part in state.tensors()] == shapes


def test_a_far_chunk_with_small_similarities_is_not_lost_in_those_of_the_own_chunk() -> None:
    """Not the total without the own chunk: its rounding is larger than what the other chunk adds."""
    q, v = torch.ones(1, 1, 8, 2), torch.randn(1, 1, 8, 2)
    k = torch.cat([torch.full((1, 1, 4, 2), -30.0), torch.full((1, 1, 4, 2), 1e8)], 2)
    layer = MixedChunk(2, n_heads=1, chunk_size=4, features="relu")
    out = layer.attend(q, k, v, None) - F.scaled_dot_product_attention(q, k[:, :, 4:], v[:, :, 4:])
    torch.testing.assert_close(out[:, :, 4:], v[:, :, :4].mean(2, keepdim=True).expand(-1, -1, 4, -1), atol=1e-4, rtol=0)


def test_only_cosine_features_limit_the_length() -> None:
    assert [build("own", features).longest_sequence for features in SIMILARITIES] == [None, None, LONGEST]
    layer = build("own", "cos", causal=True)
    message = "max_length is 40 in this MixedChunk, but the sequence has 41 tokens"
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(1, 41, 12))
    _, state = layer.extend(torch.zeros(1, 40, 12), layer.init_state(1))
    with pytest.raises(ValueError, match=message):
        layer.extend(torch.zeros(1, 1, 12), state)


def test_values_that_are_not_allowed_are_named() -> None:
    with pytest.raises(ValueError, match="local is 'far', but must be one of 'own', 'overlapping'"):
        build("far", "relu")
    with pytest.raises(ValueError, match="features is 'exp', but must be one of 'relu', 'elu', 'cos'"):
        build("own", "exp")
