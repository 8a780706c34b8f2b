import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lineartime
from lineartime.errors import ArgumentError
from lineartime.models import cost as costs
from lineartime.models.cost import cost, count_parameters, stream_bytes
from lineartime.models.systems import resolve


def test_operations_are_those_of_the_matrix_products() -> None:
    # 4 blocks: projections 2 (3 d^2 + d^2) and 2 (3 d 683), all T keys twice; and the logits.
    d, length = 256, 512
    config = resolve("transformer++-tiny")
    per_block = 2 * (4 * d * d) + 2 * (3 * d * 683) + 2 * 2 * length * d
    assert cost(config, length).flops_per_token == pytest.approx(4 * per_block + 2 * d * 258)


def test_operations_of_flash_are_those_inside_chunks_and_of_their_sums() -> None:
    config, length = resolve("flash-tiny"), 1024
    (d, n_blocks), (s, c) = (config.d_model, config.n_blocks), (config.mixer.options[name] for name in ("d_qk", "chunk_size"))
    maps, inside = 2 * d * (2 * 2 * d + s) + 2 * 2 * d * d, 2 * c * (s + 2 * d)
    across = 2 * 2 * s * 2 * d * (1 - c / length)  # the first chunk reads no sum, and the last is in none
    assert cost(config, length).flops_per_token == pytest.approx(n_blocks * (maps + inside + across) + 2 * d * 258)


@pytest.mark.parametrize("name", ["flash-tiny", "transformer+-tiny", "hybrid-gau-tiny", "gla-tiny"])
def test_costs_found_on_the_first_blocks_are_those_of_the_whole_model(name: str) -> None:
    config = resolve(name)
    found = cost(config, 300)
    assert found.parameters == count_parameters(config)
    model = lineartime.build(config)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        lineartime.build(config)(torch.zeros(1, 300, dtype=torch.long))
    assert found.flops_per_token * 300 == pytest.approx(counter.get_total_flops())
    _, state = model.extend(torch.zeros(1, 300, dtype=torch.long))  # type: ignore[union-attr]
    assert found.state_bytes == state.nbytes


def test_linear_systems_stream_with_constant_memory() -> None:
    linear = ["flash", "flash-local", "flash-overlapping", "mc-tfm++", "performer", "linear-elu", "efficient", "linear-taylor"]
    growing = ["combiner", "flash-weighted", "flash-quad", "transformer++", "sparse", "reformer"]
    for system in (*linear, *growing):
        short, long = (stream_bytes(resolve(f"{system}-tiny"), length) for length in (256, 1024))
        assert short is not None
        assert long is not None
        assert long > short if system in growing else long == short, system


def test_token_shift_costs_half_a_token_of_state_and_nothing_else() -> None:
    plain, shifted = (cost(resolve("flash-tiny", token_shift=token_shift), 300) for token_shift in (False, True))
    assert plain.state_bytes is not None
    assert shifted == plain._replace(state_bytes=plain.state_bytes + 8 * 128 * 4)  # blocks x half of d x float32


@pytest.mark.parametrize("preset", ["flash-tiny", "transformer-tiny", "gau-multi-head-tiny"])
def test_the_size_of_a_model_is_that_of_its_tensors(preset: str) -> None:
    config = resolve(preset, n_blocks=3)
    tensors = lineartime.build(config).state_dict()
    found = dict(costs.model_tensors(config))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: tensor.shape for name, tensor in tensors.items()}


def test_the_option_that_needs_too_much_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "memory_bytes", lambda device: 4 * 10**9)
    with pytest.raises(ArgumentError, match=r"^n_blocks is 5,000, with which the model has"):
        costs.check_memory(resolve("flash-base", n_blocks=5000))
    with pytest.raises(ArgumentError, match=r"^vocab_size is 100,000,000, with which the model has"):
        costs.check_memory(resolve("flash-base", vocab_size=10**8))
    tokens: list[tuple[dict[str, int], str]] = [
        ({"sequences": 4, "tokens": 4 * 2**20}, r"^context_length puts 1,048,576 tokens in memory .* least 5.7\d* GB"),
        ({"sequences": 4, "tokens": 4 * 2**18}, r"^batch_size puts 1,048,576 tokens in memory .* least 5.7\d* GB"),
        ({"sequences": 1, "tokens": 2**10, "step_tokens": 2**28}, r"^tokens_per_batch puts 268,435,456 tokens .* 4.35 GB"),
    ]
    for of_a_step, message in tokens:
        with pytest.raises(ArgumentError, match=message):
            costs.check_memory(resolve("flash-tiny"), copies=4, **of_a_step)
