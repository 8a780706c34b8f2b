"""Compiling a layer or a model as a whole, packs included."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lineartime
from lineartime.layers import FLASH, GAU, set_backend

# PyTorch's own, within torch.compile, where a user does not see them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

LAYERS: dict[str, Any] = {
    "flash with a token shift": lambda: FLASH(16, d_qk=8, chunk_size=16, causal=True, token_shift=True),
    "gau": lambda: GAU(16, d_qk=8, causal=True),
    "gau with a table": lambda: GAU(16, d_qk=8, max_length=36),  # shorter than the packs
}
PACKS = [[0, 5, 40], [0, 17, 20, 45], [0, 0, 30, 31, 52], [0, 35, 70, 75]]


def read(layer: Any, x: Tensor, *rest: Any, vary: dict[int, list[int]] | None = None) -> tuple[Tensor, Tensor]:
    """The outputs, and the gradient of the sum of their squares; `vary` are the dimensions of arguments that will change."""
    x = x.detach().requires_grad_()
    for argument, dimensions in (vary or {}).items():
        torch._dynamo.maybe_mark_dynamic([x, *rest][argument], dimensions)
    out = layer(x, *rest)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return out, gradient


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_reads_other_packs_without_a_graph_break_or_compiling_again(name: str) -> None:
    torch._dynamo.reset()
    layer = LAYERS[name]().double()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    reference = LAYERS[name]().double()
    reference.load_state_dict(layer.state_dict())
    set_backend(reference, "oracle")
    for index, ends in enumerate(PACKS):
        x, cu_seqlens = torch.randn(1, ends[-1], 16, dtype=torch.float64), torch.tensor(ends)
        # FLASH compiles once more at the second pack, where the number of chunks passes a power of two.
        with torch._dynamo.config.patch(error_on_recompile=index > int("flash" in name)):
            fast = read(compiled, x, None, cu_seqlens, vary={0: [1], 2: [0]})
        for one, other in zip(fast, read(reference, x, None, cu_seqlens), strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=0)
    with pytest.raises(RuntimeError, match="cu_seqlens must be nondecreasing from 0 to the number of tokens of the row"):
        compiled(torch.randn(1, 50, 16, dtype=torch.float64), None, torch.tensor([0, 30, 20, 50]))
    if name == "gau with a table":
        with pytest.raises(RuntimeError, match="max_length is 36, but a sequence has more tokens"):
            compiled(torch.randn(1, 50, 16, dtype=torch.float64), None, torch.tensor([0, 40, 45, 50]))
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["flash with a token shift", "gau"])
def test_a_compiled_layer_reads_other_masks_without_compiling_again(name: str) -> None:
    torch._dynamo.reset()
    layer = LAYERS[name]()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for index, (batch, length) in enumerate([(2, 40), (3, 45), (4, 52)]):
        x, mask = torch.randn(batch, length, 16), (torch.rand(batch, length) > 0.4).long()
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            fast = read(compiled, x, mask, vary={0: [0, 1], 1: [0, 1]})
        for one, other in zip(fast, read(layer, x, mask.bool()), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    with pytest.raises(RuntimeError, match="mask has values other than 0 and 1"):
        compiled(torch.randn(2, 41, 16), 2 * torch.ones(2, 41, dtype=torch.long))
    torch._dynamo.reset()


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.nightly), True])
@torch.no_grad()
def test_a_compiled_flash_reads_other_lengths_without_compiling_again(causal: bool) -> None:
    torch._dynamo.reset()
    layer = FLASH(16, d_qk=8, chunk_size=16, causal=causal)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for index, (batch, length) in enumerate([(2, 40), (3, 48), (4, 33), (5, 64)]):  # whole chunks, and others; two, and more
        x = torch.randn(batch, length, 16)
        torch._dynamo.maybe_mark_dynamic(x, [0, 1])
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=0)
    torch._dynamo.reset()


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["flash-tiny", "flash-quad-tiny", "transformer++-tiny"])
def test_a_model_compiled_as_a_whole_reads_packs(preset: str) -> None:
    torch._dynamo.reset()
    model = lineartime.build(preset, d_model=16, n_blocks=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for index, ends in enumerate(PACKS[:3]):
        ids, cu_seqlens = torch.randint(0, 258, (1, ends[-1])), torch.tensor(ends)
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
        with torch._dynamo.config.patch(error_on_recompile=index > int(preset == "flash-tiny")):  # as above
            logits = compiled(ids, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(logits, model(ids, cu_seqlens=cu_seqlens), atol=1e-5, rtol=0)
    torch._dynamo.reset()
