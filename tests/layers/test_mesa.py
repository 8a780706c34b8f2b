"""FLASH with the memory mesa: every form of the layer against its definition, one query at a time."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import assert_same_with_gradients, noisy
from torch import Tensor

from lineartime.layers import set_backend
from lineartime.layers.mesa import FLASHMesa, MemoryState, folded, inverse
from lineartime.ops import describe, oracle, rope, tiles

CHUNK = 4
PACK = torch.tensor([0, 1, 14, 18, 34])


def layer_of(causal: bool) -> FLASHMesa:
    layer: FLASHMesa = noisy(FLASHMesa(8, d_qk=4, chunk_size=CHUNK, causal=causal).double(), 0.4)
    return layer


def by_definition(layer: FLASHMesa, x: Tensor, prefix: int = 0) -> Tensor:
    """The output of one document, [T, d]: each query by the ridge regression over the tokens that it reads."""
    gate, v, y = layer.to_gate_value_base(layer.before(x)).split([layer.d_gate, layer.d_value, layer.d_qk], 1)
    before, v, s = F.pad(y, (0, 0, 1, 0))[:-1], F.silu(v), layer.d_qk
    q, k = (y * now + before * then for now, then in zip(layer.gamma[2:], layer.beta[2:], strict=True))
    k = k / k.norm(dim=1, keepdim=True) * s**0.5
    maps = [
        rope(F.silu(y) * gamma + beta, torch.arange(len(x)))
        for gamma, beta in zip(layer.gamma[:2], layer.beta[:2], strict=True)
    ]
    options = layer.options(describe((1, len(x)), device=x.device))
    read = []
    for t in range(len(x)):
        n = t // CHUNK * CHUNK if layer.causal else len(x)
        n = prefix if t < prefix else n
        keys, values = k[:n], v[:n]
        ridge = max(1, n) * torch.eye(s, dtype=x.dtype)
        read.append(q[t] @ torch.linalg.solve(ridge + keys.mT @ keys, keys.mT @ values))
    out = oracle.of_document(*maps, None, None, v, options, prefix) + torch.stack(read)
    return layer.after(x, layer.to_output(F.silu(gate) * out))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{length} tokens": (length, {}) for length in (1, 4, 5, 17, 34)},
    "mask": (34, {"mask": torch.arange(34) % 7 % 3 != torch.tensor([[0], [1]])}),
    "pack": (34, {"cu_seqlens": PACK}),
    "prefix": (34, {"prefix_lengths": torch.tensor([3, 21])}),
}


@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize(
    ("case", "causal"), [(case, causal) for case in CASES for causal in (True, False) if causal or case != "prefix"]
)
def test_every_form_is_the_definition(backend: Any, case: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_TOKENS", 2 * CHUNK)
    length, options = CASES[case]
    layer = layer_of(causal)
    x = torch.randn(1 if case == "pack" else 2, length, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros_like(x)
    prefixes = options.get("prefix_lengths", torch.zeros(2, dtype=torch.long)).tolist()
    for row, real in enumerate(options.get("mask", torch.ones(len(x), length, dtype=torch.bool))):
        for start, stop in pairwise(PACK.tolist() if case == "pack" else [0, length]):
            at = real[start:stop].nonzero()[:, 0] + start
            expected = expected.index_put((torch.tensor(row), at), by_definition(layer, x[row, at], prefixes[row]))
    set_backend(layer, backend)
    assert_same_with_gradients(layer(x, **options), expected, [x, *layer.parameters()], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("sizes", [[1] * 21, [3, 6, 4, 0, 1, 7], [8, 12, 1]])
def test_streams_are_rows_however_they_are_cut(gradients: bool, backend: Any, sizes: list[int]) -> None:
    layer, x = layer_of(True), torch.randn(2, 21, 8, dtype=torch.float64, requires_grad=gradients)
    set_backend(layer, backend)
    state, outputs = layer.init_state(2), []
    with torch.set_grad_enabled(gradients):
        for piece in x.split(sizes, 1):
            out, state = layer.extend(piece, state)
            outputs.append(out)
        found, whole = torch.cat(outputs, 1), layer(x)
    assert_same_with_gradients(found, whole, [x, *layer.parameters()] if gradients else [], atol=1e-10, rtol=1e-10)


def test_mesa_has_a_first_and_a_second_derivative() -> None:
    layer, x = layer_of(True), torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    set_backend(layer, "torch")
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


def test_mesa_recalls_what_followed_a_token_as_it_was() -> None:
    """A key begins as the token before, so that recall needs no training."""
    tokens, values = torch.randn(8, 64), torch.randn(8, 64)
    x = torch.stack([tokens, values], 1).flatten(0, 1)  # a token, then what follows it
    layer = FLASHMesa(64, d_qk=64, chunk_size=16, causal=True, relative_bias=False)

    def maps(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, v, y = layer.to_gate_value_base(layer.before(x)).split([layer.d_gate, layer.d_value, layer.d_qk], 1)
        (_, _, q, k), _ = layer.queries_and_keys(y, describe((1, len(x)), device=x.device), None)
        return q, k, F.silu(v)

    _, k, v = maps(x)
    asked, *_ = maps(tokens)
    read = asked @ inverse(k.mT @ k, torch.tensor(16)) @ (k.mT @ v)
    nearest = torch.cdist(F.normalize(read, dim=-1), F.normalize(v[1::2], dim=-1)).argmin(1)
    assert nearest.tolist() == list(range(8))


def test_memory_is_stable_over_long_texts_in_bf16() -> None:
    """The transition of S has eigenvalues in [0, 1]."""
    random = torch.Generator().manual_seed(0)
    known, unit = F.normalize(torch.randn(16, 32, generator=random), dim=-1), torch.eye(32)
    size, s, p = 256, torch.zeros(1, 32, 8), torch.zeros(1, 32, 32)
    for n in range(0, 65_536, size):
        place = torch.randint(16, (size,), generator=random)
        k, v = (32**0.5 * known[place]).bfloat16(), torch.randn(16, 8, generator=random)[place].bfloat16()
        before, position = n * unit + p[0], torch.tensor([n + size])
        state = MemoryState(position, s, torch.stack([k, k])[None], v[None], torch.zeros(1, 32), p.clone())
        s, p = folded(state).values()
        eigenvalues = torch.linalg.eigvals(torch.linalg.inv((n + size) * unit + p[0]) @ before)
        assert eigenvalues.real.min() > -1e-3
        assert eigenvalues.abs().max() < 1 + 1e-3
    assert s.isfinite().all()
