"""Memories of mixed chunk attention: every form of a layer against the definition, which reads one query at a time."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.layers import FLASH, set_backend
from lineartime.ops.mixed_chunk import cpu
from lineartime.ops.mixed_chunk.memories import FOLDED, Memory, chunk_terms, fold, fold_mesa, weighted_keys

CHUNK = 4
MEMORIES = get_args(Memory)[1:]
PACK = torch.tensor([0, 1, 14, 18, 34])


def layer_of(memory: Memory, causal: bool, **options: Any) -> FLASH:
    layer = FLASH(8, d_qk=4, chunk_size=CHUNK, memory=memory, causal=causal, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return layer


def values_and_gradients(layer: FLASH, backend: Any, x: Tensor, **batch: Any) -> list[Tensor]:
    set_backend(layer, backend)
    out = layer(x, **batch)
    direction = (torch.arange(out.numel(), dtype=x.dtype) % 7 - 3).view_as(out)
    return [out, *torch.autograd.grad((out * direction).sum(), [x, *layer.parameters()], materialize_grads=True)]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("length", [1, 4, 5, 17, 34])
def test_every_form_is_the_definition(memory: Memory, backend: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE_TOKENS", 2 * CHUNK)
    for causal in (True, False) if memory == "mesa" else (True,):
        layer, x = layer_of(memory, causal), torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
        found, exact = (values_and_gradients(layer, each, x) for each in (backend, "oracle"))
        torch.testing.assert_close(found, exact, atol=1e-10, rtol=1e-10)


def test_mesa_has_a_first_and_a_second_derivative() -> None:
    layer, x = layer_of("mesa", True), torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    set_backend(layer, "torch")
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("kind", ["mask", "pack", "prefix"])
def test_documents_and_prefixes_are_the_definition(memory: Memory, backend: str, kind: str) -> None:
    if kind == "prefix" and memory in FOLDED:
        assert not layer_of(memory, True).reads_prefix
        return
    layer, rows = layer_of(memory, True), 1 if kind == "pack" else 2
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


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_layer_that_replaces_a_step_computes_the_same_also_in_streams(memory: Memory) -> None:
    layer, x = layer_of(memory, True), torch.randn(2, 21, 8, dtype=torch.float64)
    replaced = Replaced(8, d_qk=4, chunk_size=CHUNK, memory=memory, causal=True).double()
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
    summary, _ = fold_mesa(torch.zeros(64, 128), torch.zeros(64, 64), 0, chunk_terms("mesa", k[0], v[0]), 16)
    read = asked[0] @ summary
    nearest = torch.cdist(F.normalize(read, dim=-1), F.normalize(v[0, 1::2], dim=-1)).argmin(1)
    assert nearest.tolist() == list(range(8))


@pytest.mark.parametrize("memory", MEMORIES)
def test_memories_are_stable_over_long_texts_in_bf16(memory: Memory) -> None:
    """The transition of S has eigenvalues in [0, 1], and 65,536 tokens later, proximal recalls the last values."""
    random = torch.Generator().manual_seed(0)
    known = F.normalize(torch.randn(16, 32, generator=random), dim=-1)
    size, s, p, unit = 256, torch.zeros(32, 8), torch.zeros(32, 32), torch.eye(32)
    for chunk in range(65_536 // size):
        n = torch.full((1, 1), float(chunk * size))
        place = torch.randint(16, (size,), generator=random)
        table = torch.randn(16, 8, generator=random)  # each chunk has other values for the same keys
        strength = torch.randn(size, 32 if memory == "decay" else 1, generator=random) + 2
        x = 32**0.5 * known[place] if memory == "mesa" else weighted_keys(memory, known[place], strength)
        terms = chunk_terms(memory, x.bfloat16(), table[place].bfloat16())
        transition = {
            "decay": terms.gram.squeeze(-1).expand(32, 32) * unit,
            "delta": unit - terms.gram / size,
            "proximal": torch.linalg.inv(unit + terms.gram),
            "mesa": torch.linalg.inv((n + size) * unit + p + terms.gram) @ (n * unit + p),
        }[memory]
        eigenvalues = torch.linalg.eigvals(transition)
        assert eigenvalues.real.min() > -1e-3
        assert eigenvalues.abs().max() < 1 + 1e-3
        s, p = fold_mesa(s, p, n, terms, size) if memory == "mesa" else (fold(memory, s, terms, size), p)
    assert s.isfinite().all()
    error = (known @ s - table).square().mean() / table.square().mean()
    assert (error < 0.05) == (memory == "proximal")  # which alone replaces what a key had before by the last chunk
