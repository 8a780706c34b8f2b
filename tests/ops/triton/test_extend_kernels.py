"""The kernels that read whole chunks of a prompt, against plain PyTorch in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lineartime.foreign import ForeignFLASH
from lineartime.layers import FLASH
from lineartime.layers.gated import set_backend
from lineartime.ops.mixed_chunk import triton

pytest.importorskip("triton")
# Triton 3.9 announces another default for 3.10 whenever it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

CHUNK, D_MODEL = 16, 24
# Options, and pieces that are read with them: whole chunks follow an open chunk, precede one, or both; some pieces have none.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "count": ({}, [40, 3, 21]),
    "the published divisor": ({"normalization": "paper"}, [64]),
    "published sums": ({"normalization": "paper_sum"}, [7, 57]),
    "laplace": ({"activation": "laplace"}, [16, 48]),
    "bias of buckets": ({"bias_form": "buckets"}, [1, 15, 33, 15]),
    "without bias and rotation": ({"relative_bias": False, "rope": False}, [5, 5, 54]),
    "rotated in part": ({"rotary_width": 4}, [40, 3, 21]),
    "token shift": ({"token_shift": True, "initial_scores": "unit"}, [40, 3, 21]),
}


def build(device: str, dtype: torch.dtype = torch.float64, **options: Any) -> FLASH:
    layer = ForeignFLASH(D_MODEL, d_qk=8, chunk_size=CHUNK, causal=True, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(device, dtype)


def read(layer: FLASH, x: Tensor, sizes: list[int], backend: Any) -> tuple[Tensor, list[Tensor]]:
    """The outputs of a sequence that is read in pieces, and the tensors of the state after it."""
    set_backend(layer, backend)
    state, outputs = layer.init_state(len(x)), []
    for piece in x.split(sizes, 1):
        out, state = layer.extend(piece, state)
        outputs.append(out)
    own = getattr(state, "own", state)
    read = torch.arange(CHUNK, device=x.device) < own.position[:, None] % CHUNK  # other slots hold any numbers
    keys, values = own.keys.masked_fill(~read[:, None, :, None], 0.0), own.values.masked_fill(~read[..., None], 0.0)
    return torch.cat(outputs, 1), [own.summary, keys, values]


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_prompt_are_the_forward_pass(name: str, device: str) -> None:
    options, sizes = CASES[name]
    dtype, tolerance = (torch.float64, 1e-12) if device == "cpu" else (torch.float32, 1e-4)
    exact, x = build(device, **options), torch.randn(2, 64, D_MODEL, dtype=torch.float64, device=device)
    layer = build(device, dtype, **options)
    layer.load_state_dict(exact.state_dict())
    set_backend(exact, "torch")
    out, state = read(layer, x.to(dtype), sizes, "triton")
    torch.testing.assert_close(out.double(), exact(x), atol=tolerance, rtol=tolerance)
    for found, wanted in zip(state, read(exact, x, sizes, "torch")[1], strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_of_outputs_and_states_are_at_most_twice_those_of_plain_pytorch(dtype: torch.dtype, device: str) -> None:
    exact, x = build(device), torch.randn(2, 90, D_MODEL, dtype=torch.float64, device=device)
    layer = build(device, dtype)
    layer.load_state_dict(exact.state_dict())
    sizes = [CHUNK, 2 * CHUNK + 5, 90 - 3 * CHUNK - 5]
    wanted, plain, fast = (
        [out, *state]
        for out, state in (
            read(exact, x, sizes, "torch"),
            read(layer, x.to(dtype), sizes, "torch"),
            read(layer, x.to(dtype), sizes, "triton"),
        )
    )
    for x, y, z in zip(fast, plain, wanted, strict=True):
        assert x.dtype == y.dtype
        tiny = torch.finfo(torch.float32).eps * z.abs().max()
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 8 * tiny


@torch.no_grad()
def test_autocast_is_that_of_plain_pytorch(device: str) -> None:
    layer, x = build(device, torch.float32), torch.randn(2, 70, D_MODEL, device=device)
    exact, _ = read(layer.double(), x.double(), [32, 38], "torch")
    layer.float()
    with torch.autocast(device, dtype=torch.bfloat16):
        plain, fast = (read(layer, x, [32, 38], backend)[0] for backend in ("torch", "triton"))
    assert fast.dtype == plain.dtype
    assert (fast - exact).abs().max() <= 2 * (plain - exact).abs().max()


@torch.no_grad()
def test_whole_chunks_alone_are_read_by_kernels(allocations: list[tuple[int, ...]], device: str) -> None:
    layer, x = build(device, torch.float32), torch.randn(1, 7 + 2 * CHUNK + 3, D_MODEL, device=device)
    read(layer, x, [7 + 2 * CHUNK + 3], "triton")  # 7 and 3 tokens at the ends: the first chunk is open after 7
    values = (1, 2, CHUNK, 2 * D_MODEL)
    assert values in allocations
    allocations.clear()
    read(layer, x[:, : CHUNK - 1], [7, CHUNK - 8], "triton")
    read(layer, x, [len(x[0])], "torch")
    assert not allocations


@pytest.mark.parametrize(("is_frozen", "sizes"), [(False, [16, 32]), (True, [20, 28])])
def test_gradients_are_those_of_plain_pytorch(is_frozen: bool, sizes: list[int], device: str) -> None:
    layer = build(device).requires_grad_(not is_frozen)
    first, rest = torch.randn(1, 48, D_MODEL, dtype=torch.float64, device=device).split(sizes, 1)
    first.requires_grad_()  # the second piece depends on it by the state alone
    gradients = []
    for backend in ("torch", "triton"):
        set_backend(layer, backend)
        _, state = layer.extend(first, None)
        out, _ = layer.extend(rest, state)
        gradients.append(torch.autograd.grad(out.square().sum(), first)[0])
    assert gradients[0].any()
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_what_the_kernels_cannot_compute_is_read_in_plain_pytorch(allocations: list[tuple[int, ...]], device: str) -> None:
    layer, x = build(device, torch.float32, activation="softmax"), torch.randn(1, 48, D_MODEL, device=device)
    out, _ = read(layer, x, [48], "triton")
    assert not allocations
    torch.testing.assert_close(out, read(layer, x, [48], "torch")[0])


def test_the_operator_keeps_the_promises_of_a_custom_op(device: str) -> None:
    tokens, tables = torch.randn(2, 3, CHUNK, 2 * 40 + 8, device=device), torch.rand(2, 4, 8, device=device)
    scales = (torch.rand(2, 3, CHUNK, device=device), torch.rand(2, 3, device=device))
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    summary = torch.randn(2, 8, 40, device=device)
    rotations = torch.randn(2, 1, 3, CHUNK, 4, device=device)
    arguments = (tokens, *tables.unbind(), None, rotations, None, *scales, starts, 0.25, True, "relu2", summary)
    torch.library.opcheck(triton.extend_operator, arguments)


def test_its_products_are_counted() -> None:
    layer = ForeignFLASH(D_MODEL, d_qk=8, chunk_size=CHUNK, causal=True, device="meta")
    counts = []
    for by_kernels in (False, True):
        with torch.no_grad(), FlopCounterMode(display=False) as counter, pytest.MonkeyPatch.context() as patch:
            patch.setattr("lineartime.ops.mixed_chunk.triton.why_not", lambda *_: None)
            set_backend(layer, "triton" if by_kernels else "torch")
            layer.extend(torch.zeros(2, 64, D_MODEL, device="meta"), None)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


@torch.no_grad()
def test_no_streams_and_no_tokens_give_empty_outputs(device: str) -> None:
    layer = build(device, torch.float32)
    for shape in ((0, 2 * CHUNK, D_MODEL), (2, 0, D_MODEL)):
        out, _ = read(layer, torch.zeros(shape, device=device), [shape[1]], "triton")
        assert out.shape == shape
