"""torch.export of layers: one program reads any batch size and length, and gives the layer's own values."""

import copy
from typing import Any

import pytest
import torch
from tests.definitions import assert_same_with_gradients
from tests.layers.test_mixer_contract import CASES, D_MODEL
from tests.layers.test_mixer_contract import build as mixer_of
from torch import Tensor, nn
from torch.export import Dim, export
from torch.func import jvp

from lineartime.layers import FLASH, GAU, Attention, set_backend
from lineartime.layers.mixer import Mixer

# PyTorch's own, within torch.export, where a user does not see them.
pytestmark = pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*:FutureWarning")

SIZES = [(1, 0), (2, 8), (5, 40), (2, 52), (4, 5)]  # rows, and tokens beyond a chunk
DAILY = [("flash", True, True), ("flash, chunk_size=513", False, False), ("gau", True, False)]
# Another memory than the sum cannot be exported.
OF_UNITS = ("flash", "gau", "flash-foreign", "gau-foreign")
UNITS = [name for name in CASES if name.split(",")[0] in OF_UNITS and "memory" not in name]
NIGHTLY = [(name, causal, (index + causal) % 2 == 0) for index, name in enumerate(UNITS) for causal in (False, True)]


def build(name: str, causal: bool) -> Mixer:
    return mixer_of(name, causal, token_shift=name == "flash").double()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, D_MODEL, dtype=torch.float64, requires_grad=True)


def shortest_of(layer: Any) -> int:
    """The minimum length of a program of a layer: a chunk."""
    return getattr(layer, "chunk_size", None) or 3


def exported(layer: Any, *example: Tensor) -> Any:
    shortest = shortest_of(layer)
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=shortest, max=shortest + 60)
    return export(layer, example, dynamic_shapes=tuple({0: batch, 1: length} for _ in example))


@pytest.mark.parametrize(
    ("name", "causal", "masked"), [*DAILY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)]
)
def test_exported_layer_is_the_definition_at_other_batch_sizes_and_lengths(name: str, causal: bool, masked: bool) -> None:
    layer = build(name, causal)
    shortest = shortest_of(layer)
    example = (tokens(3, shortest + 29), torch.rand(3, shortest + 29) > 0.3) if masked else (tokens(3, shortest + 29),)
    program = exported(layer, *example).module()
    set_backend(layer, "oracle")
    for batch, more in SIZES:
        length = shortest + more
        x, mask = tokens(batch, length), torch.rand(batch, length) > 0.3
        given = (x, mask) if masked else (x,)
        assert_same_with_gradients(program(*given), layer(*given), [x], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["flash", pytest.param("gau", marks=pytest.mark.nightly)])
def test_exported_layer_reads_packs_and_refuses_what_the_layer_refuses(name: str) -> None:
    layer = build(name, causal=True)
    length, count = Dim("length", min=3, max=4096), Dim("count", min=3, max=64)  # two documents or more
    example = (tokens(1, 40), None, torch.tensor([0, 5, 40]))
    program = export(layer, example, dynamic_shapes=({1: length}, None, {0: count})).module()
    set_backend(layer, "oracle")
    for ends in ([0, 17, 20, 45], [0, 0, 3, 60], [0, 64, 100]):
        x = tokens(1, ends[-1])
        torch.testing.assert_close(
            program(x, None, torch.tensor(ends)), layer(x, None, torch.tensor(ends)), atol=1e-10, rtol=1e-9
        )
    with pytest.raises(RuntimeError, match="cu_seqlens must be nondecreasing from 0 to the number of tokens of the row"):
        program(tokens(1, 9), None, torch.tensor([0, 5, 4, 9]))


def test_parameters_of_an_exported_layer_get_the_layers_gradients_and_its_mask_holds_zeros_and_ones() -> None:
    layer = build("flash", causal=True)
    program = exported(layer, tokens(3, 37), torch.ones(3, 37, dtype=torch.long)).module()
    x, mask = tokens(2, 20), (torch.rand(2, 20) > 0.5).long()
    out, whole = program(x, mask), layer(x, mask)
    torch.testing.assert_close(out, whole, atol=1e-10, rtol=1e-9)
    own = dict(program.named_parameters())
    gradients = torch.autograd.grad(out.square().sum(), [own[name] for name, _ in layer.named_parameters()])
    expected = torch.autograd.grad(whole.square().sum(), list(layer.parameters()))
    torch.testing.assert_close(gradients, expected, atol=1e-9, rtol=1e-9)
    with pytest.raises(RuntimeError, match="mask has values other than 0 and 1"):
        program(x, 2 * mask)


class Extended(nn.Module):
    def __init__(self, layer: Mixer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.extend(x, None)[0]


@pytest.mark.parametrize(
    ("layer", "used", "strict"),
    [
        (FLASH(D_MODEL, d_qk=4, chunk_size=16, causal=True, token_shift=True), False, False),
        (GAU(D_MODEL, d_qk=4, causal=True), True, False),
        pytest.param(Attention(D_MODEL, n_heads=2, causal=True), False, True, marks=pytest.mark.nightly),
        pytest.param(FLASH(D_MODEL, d_qk=4, chunk_size=16, causal=True), True, True, marks=pytest.mark.nightly),
    ],
)
def test_layer_streams_before_and_after_a_stream_is_exported(layer: Mixer, used: bool, strict: bool) -> None:
    layer, x = layer.double(), tokens(1, 5)
    if used:
        layer.extend(x, None)
    program = export(Extended(layer), (x,), strict=strict).module()
    expected = layer(x)
    torch.testing.assert_close(program(x), expected)
    for each in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(each.extend(x, each.init_state(1))[0], expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning")  # of PyTorch's jvp
@pytest.mark.parametrize("name", ["flash", pytest.param("gau", marks=pytest.mark.nightly)])
def test_program_has_masked_prefixes_and_every_derivative(name: str) -> None:
    layer = build(name, causal=True)
    batch, length = Dim("batch", min=1, max=64), Dim("length", min=8, max=60)
    sizes, example = {0: batch, 1: length}, (tokens(3, 37), torch.rand(3, 37) > 0.3, None, torch.tensor([0, 5, 20]))
    program = export(layer, example, dynamic_shapes=(sizes, sizes, None, {0: batch})).module()
    for size in ((2, 9), (3, 19)):
        x, mask = tokens(*size), torch.rand(size) > 0.3
        rest = mask, None, (torch.rand(size[0]) * (mask.sum(1) + 1)).long()
        set_backend(layer, "oracle")
        torch.testing.assert_close(program(x, *rest), layer(x, *rest), atol=1e-10, rtol=1e-9)
    with pytest.raises(RuntimeError, match="prefix_lengths must be from 0 to the number of real tokens of each row"):
        program(x, mask, None, torch.tensor([0, 0, 20]))
    set_backend(layer, "torch")
    twice = []
    for run in (program, layer):
        (gradient,) = torch.autograd.grad(run(x, *rest).square().sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*twice, atol=1e-9, rtol=1e-9)
    forward = [jvp(lambda x, run=run: run(x, *rest), (x.detach(),), (torch.ones_like(x),))[1] for run in (program, layer)]
    torch.testing.assert_close(*forward, atol=1e-9, rtol=1e-9)
