"""The ops with backend="triton": what they hand to the kernels, for masks, packs, normalisations and dtypes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ops.cases import bias_of, options_of, packing_of
from torch import Tensor, nn

from lineartime.errors import ArgumentError
from lineartime.layers import FLASH, GAU, set_backend
from lineartime.ops import backends
from lineartime.ops.mixed_chunk import MixedChunkOptions, attend
from lineartime.ops.packing import Packing

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


def make_inputs(count: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(count, width, device=device, dtype=dtype).requires_grad_() for width in (16, 16, 24)]


def run(inputs: list[Tensor], packing: Packing, options: MixedChunkOptions, backend: Any = "triton") -> Tensor:
    q, k, v = inputs
    return attend(q, k, None, None, v, packing, replace(options, backend=backend))[0]


def assert_same(inputs: list[Tensor], packing: Packing, options: MixedChunkOptions, atol: float = 1e-5) -> None:
    """Values and gradients of the kernels are those of plain PyTorch in float64."""
    results = []
    for backend in ("triton", "torch"):
        args = [x.detach().to(torch.float64 if backend == "torch" else x.dtype).requires_grad_() for x in inputs]
        out = run(args, packing, options, backend)
        results.append([x.double() for x in (out, *torch.autograd.grad(out.square().sum(), args))])
    for fast, exact in zip(*results, strict=True):
        torch.testing.assert_close(fast, exact, atol=atol * max(1.0, float(exact.detach().abs().max())), rtol=0)


@pytest.mark.parametrize("compiling", [False, True])
def test_gpu_without_the_units_of_the_kernels_takes_none_of_them_compiled_or_not(
    compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device.index == 1 else (9, 0))
    monkeypatch.setattr(backends, "_OLD_GPUS", set())
    backends.note_old_gpus.cache_clear()
    try:
        backends.note_old_gpus()
    finally:
        backends.note_old_gpus.cache_clear()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    reasons = [backends.why_not("triton", torch.device("cuda", index), torch.bfloat16, "relu2") for index in (0, 1)]
    assert reasons == [None, "it needs a GPU of compute capability 8.0 or more"]


@pytest.mark.parametrize(("causal", "normalization"), [(True, "count"), (False, "paper"), (True, "paper")])
@pytest.mark.parametrize("case", ["mask", "pack", "prefix"])
def test_kernels_read_masks_packs_and_what_plain_pytorch_leaves_them(
    causal: bool, normalization: Any, case: str, device: str
) -> None:
    parts: dict[str, dict[str, Any]] = {
        "mask": {"mask": torch.rand(2, 37, device=device) > 0.3},
        "pack": {"cu_seqlens": torch.tensor([0, 20, 20, 74], device=device)},
        "prefix": {"prefix": torch.tensor([0, 21], device=device)},
    }
    packing = packing_of(*((1, 74) if case == "pack" else (2, 37)), device=device, **parts[case])
    options = options_of(None, causal, bias_of(None, 74).float().to(device), d_qk=16, normalization=normalization)
    assert_same(make_inputs(packing.count, device), packing, options)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision_keeps_its_dtype_and_its_accuracy(dtype: torch.dtype, atol: float, device: str) -> None:
    inputs, packing, options = make_inputs(33, device, dtype), packing_of(1, 33, device=device), options_of(None, True, d_qk=16)
    assert run(inputs, packing, options).dtype == dtype
    assert_same(inputs, packing, options, atol)


def test_autocast_reaches_the_kernels(device: str) -> None:
    inputs, packing, options = make_inputs(40, device), packing_of(1, 40, device=device), options_of(None, True, d_qk=16)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = run(inputs, packing, options)
    exact = run(inputs, packing, options)
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=0)
    assert not torch.equal(out.float(), exact)


def test_flash_has_no_kernels_and_stays_as_it_is_beside_gau(device: str) -> None:
    options: dict[str, Any] = {"d_qk": 16, "causal": True, "device": device}
    gau, flash = GAU(16, **options), FLASH(16, chunk_size=16, **options)
    set_backend(nn.Sequential(gau, flash), "triton")
    assert (gau.backend, flash.backend) == ("triton", "auto")
    assert flash(torch.randn(1, 20, 16, device=device)).isfinite().all()
    with pytest.raises(ArgumentError, match="backend is 'triton', but must be one of 'auto', 'torch', "):
        set_backend(flash, "triton")


@pytest.mark.parametrize("causal", [True, False])
def test_score_that_is_nan_is_no_weight_of_zero(causal: bool, device: str) -> None:
    inputs = make_inputs(20, device)
    with torch.no_grad():
        inputs[1][7, 3] = torch.nan
    out = run(inputs, packing_of(1, 20, device=device), options_of(None, causal, d_qk=16))
    assert out[7].isnan().all()
    for gradient in torch.autograd.grad(out[7].sum(), inputs[:2]):
        assert gradient[7].isnan().any()
