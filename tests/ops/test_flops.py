"""What FlopCounterMode counts for the fused forms: as much as for plain PyTorch, but for what is said here."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lineartime
from lineartime.layers import FLASH, GAU, set_backend
from lineartime.models.cost import cost
from lineartime.models.presets import resolve
from lineartime.ops.backends import Backend

BATCH, LENGTH, CHUNK, D_QK, D_MODEL = 3, 300, 16, 8, 12
CHUNKS, D_VALUE = -(-LENGTH // CHUNK), 2 * D_MODEL


def counted(layer: nn.Module, backend: Backend, **options: Any) -> tuple[int, int]:
    """The operations of a forward and of a backward pass."""
    set_backend(layer, backend)
    x = torch.randn(1 if options else BATCH, LENGTH, D_MODEL, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out: Tensor = layer(x, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_tiled_flash_counts_what_plain_flash_does(causal: bool) -> None:
    layer = FLASH(D_MODEL, d_qk=D_QK, chunk_size=CHUNK, causal=causal)
    forward, backward = counted(layer, "torch")
    again = 2 * BATCH * CHUNKS * CHUNK * CHUNK * D_QK  # the scores of chunks are computed again to go back
    assert counted(layer, "tiled") == (forward, backward + again)


def test_the_first_chunk_reads_no_sum_and_the_last_is_in_none() -> None:
    (causal, causal_backward), (both, both_backward) = (
        counted(FLASH(D_MODEL, d_qk=D_QK, chunk_size=CHUNK, causal=causal), "torch") for causal in (True, False)
    )
    # Both ways, all chunks are in the one sum.
    spared = 2 * 2 * BATCH * CHUNK * D_QK * D_VALUE
    assert (both - causal, both_backward - causal_backward) == (spared, 2 * spared)


def test_tiled_flash_counts_packs() -> None:
    layer = FLASH(D_MODEL, d_qk=D_QK, chunk_size=CHUNK)
    cu_seqlens = torch.tensor([0, 5, 100, 300])
    (tiled, _), (plain, _) = (counted(layer, backend, cu_seqlens=cu_seqlens) for backend in ("tiled", "torch"))  # type: ignore[arg-type]
    assert tiled == plain


@pytest.mark.parametrize("causal", [False, True])
def test_tiled_gau_counts_what_plain_gau_does(causal: bool) -> None:
    layer = GAU(D_MODEL, d_qk=D_QK, causal=causal, max_length=LENGTH)
    forward, backward = counted(layer, "torch")
    pairs = 256 * 256 + 44 * LENGTH if causal else LENGTH * LENGTH  # blocks of 256 queries
    assert counted(layer, "tiled") == (forward, backward + 2 * BATCH * pairs * D_QK)  # the scores again


def test_a_rotary_bias_is_counted_as_more_features_of_queries_and_keys() -> None:
    layer = GAU(D_MODEL, d_qk=D_QK)
    (tiled, _), (plain, _) = counted(layer, "tiled"), counted(layer, "torch")
    pairs = 2 * LENGTH * LENGTH * D_QK
    assert tiled - BATCH * pairs == plain - pairs  # plain forms multiply the bias out once for all rows


@pytest.mark.parametrize("name", ["flash-tiny", "flash-quad-tiny"])
def test_a_model_counts_what_its_cost_says(name: str) -> None:
    config = resolve(name)
    length = 600
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lineartime.build(config)(torch.zeros(1, length, dtype=torch.long))
    assert counter.get_total_flops() == pytest.approx(cost(config, length).flops_per_token * length)


def test_the_loss_counts_as_much_as_logits_and_their_cross_entropy() -> None:
    model = lineartime.build("flash-tiny", d_model=16, n_blocks=1)
    set_backend(model, "torch")
    ids, targets = torch.randint(0, 258, (2, 2, 40))
    with FlopCounterMode(display=False) as fused:
        model.loss(ids, targets).backward()
    with FlopCounterMode(display=False) as plain:
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    assert fused.get_total_flops() == plain.get_total_flops() > 0


def test_an_exported_layer_counts_what_the_layer_does() -> None:
    for layer in (FLASH(D_MODEL, d_qk=D_QK, chunk_size=CHUNK), GAU(D_MODEL, d_qk=D_QK, max_length=LENGTH)):
        x = torch.randn(BATCH, LENGTH, D_MODEL)
        program = torch.export.export(layer, (x,)).module()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            program(x)
        assert counter.get_total_flops() == counted(layer, "torch")[0]


@pytest.mark.nightly
def test_a_layer_does_not_import_the_counter_and_is_counted_after_it() -> None:
    script = """
import sys
import torch
from lineartime import FLASH
layer = FLASH(8, d_qk=4)
print("torch.utils.flop_counter" in sys.modules)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch.ops.lineartime.tiled_mixed_chunk  # the fused form is what runs on a processor
    layer(torch.zeros(1, 20, 8))
print(any("tiled_mixed_chunk" in str(name) for name in counter.get_flop_counts()["Global"]))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]
