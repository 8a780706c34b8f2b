"""What the autotuner tells launches apart by."""

from types import SimpleNamespace

import pytest
import torch

common = pytest.importorskip("lineartime.ops.triton.common")
scores = pytest.importorskip("lineartime.ops.triton.score_kernels")
chunks = pytest.importorskip("lineartime.ops.triton.chunk_kernels")


def test_blocks_chosen_for_few_tokens_are_not_those_of_many() -> None:
    for kernel in (scores.attention_weights_kernel, scores.score_gradient_kernel, chunks.read_chunks_kernel):
        assert "tokens" in kernel.keys
    assert common.token_bucket(8 * 256) < common.token_bucket(256 * 64) < common.token_bucket(256 * 256)


def test_lengths_within_a_bucket_are_tuned_once() -> None:
    assert [common.length_bucket(n) for n in (1, 64, 65, 256, 1000, 1024, 1025, 65536)] == [
        64,
        64,
        256,
        256,
        1024,
        1024,
        8192,
        8192,
    ]
    # Triton compiles another kernel for an integer that 16 does not divide, and for 1.
    buckets = [common.length_bucket(n) for n in (1, 100, 1000, 9999)] + [common.token_bucket(n) for n in (1, 9999, 10**6)]
    assert all(bucket % 16 == 0 for bucket in buckets)


def test_a_pinned_configuration_is_not_timed_by_older_versions_of_triton_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch() -> None:
        raise AssertionError("a pinned kernel was launched to time it")

    monkeypatch.setattr(common, "_pinned", True)
    assert common._timed(launch, (0.5, 0.2, 0.8)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("capability", "in_registers", "little"),
    [(80, True, False), (86, True, True), (89, True, True), (90, False, False), (100, False, False), (120, True, True)],
)
def test_blocks_are_chosen_for_what_the_gpu_has(
    capability: int, in_registers: bool, little: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SimpleNamespace(backend="cuda", arch=capability)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(common.triton.runtime, "driver", driver)
    assert common.operands_in_registers() is in_registers
    assert common.little_shared_memory() is little


def test_queries_and_keys_as_wide_as_a_rotary_bias_makes_them_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "INTERPRETED", False)
    assert common.width_block(256, torch.bfloat16) == 256
    assert common.width_block(128, torch.bfloat16) == 128
    assert common.width_block(512, torch.bfloat16) == 128, "there is no room for several pieces of 256"
    assert common.width_block(128, torch.float32) == 64, "float32 takes twice the registers"
