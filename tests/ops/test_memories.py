"""The memory mesa of mixed chunk attention: every form of a layer against the definition, which reads one query at a time."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lineartime
from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, set_backend
from lineartime.models import ModelConfig
from lineartime.models.systems import resolve
from lineartime.ops.mixed_chunk import cpu
from lineartime.ops.mixed_chunk.memories import fold

CHUNK = 4
PACK = torch.tensor([0, 1, 14, 18, 34])


def layer_of(causal: bool, kind: type[FLASH] = FLASH) -> FLASH:
    layer = kind(8, d_qk=4, chunk_size=CHUNK, memory="mesa", causal=causal).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return layer


def values_and_gradients(layer: FLASH, backend: Any, x: Tensor, **batch: Any) -> list[Tensor]:
    set_backend(layer, backend)
    out = layer(x, **batch)
    direction = (torch.arange(out.numel(), dtype=x.dtype) % 7 - 3).view_as(out)
    return [out, *torch.autograd.grad((out * direction).sum(), [x, *layer.parameters()], materialize_grads=True)]


@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("length", [1, 4, 5, 17, 34])
@pytest.mark.parametrize("causal", [True, False])
def test_every_form_is_the_definition(backend: str, length: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE_TOKENS", 2 * CHUNK)
    layer, x = layer_of(causal), torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    found, exact = (values_and_gradients(layer, each, x) for each in (backend, "oracle"))
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=1e-10)


def test_mesa_has_a_first_and_a_second_derivative() -> None:
    layer, x = layer_of(True), torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    set_backend(layer, "torch")
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("kind", ["mask", "pack", "prefix"])
def test_documents_and_prefixes_are_the_definition(backend: str, kind: str) -> None:
    layer, rows = layer_of(True), 1 if kind == "pack" else 2
    x = torch.randn(rows, 34, 8, dtype=torch.float64, requires_grad=True)
    batch = {
        "mask": {"mask": torch.rand(2, 34) > 0.3},
        "pack": {"cu_seqlens": PACK},
        "prefix": {"prefix_lengths": torch.tensor([3, 21])},
    }[kind]
    found, exact = (values_and_gradients(layer, each, x, **batch) for each in (backend, "oracle"))
    torch.testing.assert_close(found, exact, atol=1e-10, rtol=1e-10)


class Replaced(FLASH):
    """A step of FLASH is replaced by itself, so that all of them are called one by one."""

    def apply_gate(self, gate: Tensor, attended: Tensor) -> Tensor:
        return super().apply_gate(gate, attended)


def test_layer_that_replaces_a_step_computes_the_same_also_in_streams() -> None:
    layer, replaced, x = layer_of(True), layer_of(True, Replaced), torch.randn(2, 21, 8, dtype=torch.float64)
    replaced.load_state_dict(layer.state_dict())
    whole = layer(x)
    torch.testing.assert_close(replaced(x), whole, atol=1e-10, rtol=0)
    first, state = replaced.extend(x[:, :10])
    rest, _ = replaced.extend(x[:, 10:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, atol=1e-10, rtol=0)


def test_mesa_recalls_what_followed_a_token_as_it_was() -> None:
    """A key begins as the token before, so that recall needs no training."""
    torch.manual_seed(0)
    tokens, values = torch.randn(8, 64), torch.randn(8, 64)
    x = torch.stack([tokens, values], 1).flatten(0, 1)  # a token, then what follows it
    layer = FLASH(64, d_qk=64, chunk_size=16, causal=True, memory="mesa", relative_bias=False)
    _, v, (_, _, _, k) = layer.project(layer.before(x)[None], layer.describe((1, 16), device=x.device))
    _, _, (_, _, asked, _) = layer.project(layer.before(tokens)[None], layer.describe((1, 8), device=x.device))
    summary, _ = fold(torch.zeros(64, 128), torch.zeros(64, 64), 0, k[0], v[0])
    read = asked[0] @ summary
    nearest = torch.cdist(F.normalize(read, dim=-1), F.normalize(v[0, 1::2], dim=-1)).argmin(1)
    assert nearest.tolist() == list(range(8))


def test_memory_is_stable_over_long_texts_in_bf16() -> None:
    """The transition of S has eigenvalues in [0, 1]."""
    random = torch.Generator().manual_seed(0)
    known = F.normalize(torch.randn(16, 32, generator=random), dim=-1)
    size, s, p, unit = 256, torch.zeros(32, 8), torch.zeros(32, 32), torch.eye(32)
    for chunk in range(65_536 // size):
        n = torch.full((1, 1), float(chunk * size))
        place = torch.randint(16, (size,), generator=random)
        k, v = (32**0.5 * known[place]).bfloat16(), torch.randn(16, 8, generator=random)[place].bfloat16()
        before, (s, p) = n * unit + p, fold(s, p, n, k, v)
        eigenvalues = torch.linalg.eigvals(torch.linalg.inv((n + size) * unit + p) @ before)
        assert eigenvalues.real.min() > -1e-3
        assert eigenvalues.abs().max() < 1 + 1e-3
    assert s.isfinite().all()


def test_configuration_with_a_memory_that_is_gone_is_refused() -> None:
    data = resolve("flash-tiny").to_dict()
    data["mixer"]["memory"] = "decay"
    with pytest.raises(ArgumentError, match="memory is 'decay', but must be one of 'sum', 'mesa'"):
        lineartime.build(ModelConfig.from_dict(data))
