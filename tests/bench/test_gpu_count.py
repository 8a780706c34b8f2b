"""What a training step costs on a GPU, counted without one."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lineartime.models.cost import cost
from lineartime.models.systems import resolve

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what PyTorch itself calls while it compiles for a GPU
    pytest.mark.skipif(shutil.which("g++") is None, reason="a device guard is compiled"),
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_count() -> Any:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("gpu_count")


class Layer(nn.Module):
    """Two products, with the faults that the first step on a GPU had: products in float32, and a second forward pass."""

    def __init__(self, exact: bool, twice: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.exact, self.twice = exact, twice

    def both(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=not self.exact, dtype=torch.bfloat16):
            return self.second(self.first(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.twice else self.both(x)


@pytest.mark.slow
@pytest.mark.parametrize(("exact", "twice"), [(False, False), (True, False), (False, True)])
def test_counter_sees_products_in_float32_and_a_second_forward_pass(gpu_count: Any, exact: bool, twice: bool) -> None:
    rows, width = 256, 64
    found = gpu_count.compiled(lambda: (Layer(exact, twice), (torch.randn(rows, width, requires_grad=True),))).figures()
    product, given = 2 * rows * width**2 / 1e6, rows * width * 4 / 1e3
    in_float32 = 2 if exact else 0  # a compiled backward pass follows the autocast around the module
    assert found.get("MFLOP float32", 0) == pytest.approx(in_float32 * product)
    assert found["MFLOP bfloat16"] == pytest.approx((6 + twice - in_float32) * product)
    assert (found["kept kB"] == given) == twice


# A token of a block, alone and in a stack: kB that kernels outside products move and that the forward pass keeps, and these
# kernels, at most.
LIMITS = {
    "flash-base": ((88, 21, 37), (82, 21.5, 32)),
    "flash-quad-base": ((91, 21.7, 61), (84, 21.7, 55)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("preset", LIMITS)
def test_block_computes_no_product_twice_or_in_float32_and_moves_no_more_than_it_did(gpu_count: Any, preset: str) -> None:
    length, config = 1024, resolve(preset, "clm")
    one, two = (gpu_count.of_blocks(preset, n_blocks, length).figures() for n_blocks in (1, 2))
    forward = (cost(config, length).flops_per_token - 2 * config.vocab_size * config.d_model) / config.n_blocks
    assert one["MFLOP bfloat16"] == pytest.approx(3e-6 * forward * gpu_count.TOKENS, rel=0.03)
    others = {name: flops for name, flops in one.items() if name.startswith("MFLOP") and name != "MFLOP bfloat16"}
    assert sum(others.values()) < 1e-3 * one["MFLOP bfloat16"]  # the rotary bias of a GAU is made in float32
    assert (one["graphs"], one["breaks"]) == (1, 0)
    for found, (moved, kept, kernels) in zip((one, gpu_count.combined((1, two), (-1, one))), LIMITS[preset], strict=True):
        assert found["moved kB"] / gpu_count.TOKENS <= moved
        assert found["kept kB"] / gpu_count.TOKENS <= kept
        assert found["kernels"] <= kernels


@pytest.mark.nightly
def test_forecast_of_flash_pytorch_is_within_a_third_of_what_a_gpu_took(gpu_count: Any) -> None:
    """191 ms on an H200: the only step that was measured of code that has not changed since."""
    pytest.importorskip("flash_pytorch")
    found = dict(gpu_count.rows_of_peer(8192))["flash-pytorch, a step"]
    assert 191 / 1.33 < found["H200 ms"] < 191
