"""The parts of attention that `open` shows: they are the mixer, and what they read is what its definition reads."""

import pytest
import torch
from tests.layers.test_mixer_contract import CASES, DIRECTIONS, build
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers import FLASH, GAU, set_backend
from lineartime.layers.mixer import Mixer, Opened
from lineartime.ops.mixed_chunk.inputs import Heads
from lineartime.ops.mixed_chunk.reference import attend

BOTH = {"flash", "flash-foreign", "flash-overlapping", "flash-weighted", "flash-first-to-all", "flash-cls", "mc-tfm"}
BOTH |= {"mixed-chunk"}
OPENED = [(name, causal) for name, causal in DIRECTIONS if CASES[name][0].why_not_opened is None]


def opened(mixer: Mixer, x: Tensor, prefix: Tensor | None = None) -> Opened:
    return mixer.open(x, mixer.describe(x.shape, prefix_lengths=prefix, device=x.device))


def added(parts: Opened) -> Tensor:
    bias = parts.combine(torch.zeros_like(parts.values))
    return torch.stack([parts.contribution(part) for part in parts.parts]).sum(0) + bias


@pytest.mark.parametrize(("name", "causal"), OPENED)
def test_the_parts_add_up_to_what_the_mixer_adds_and_are_their_weights_times_the_values(name: str, causal: bool) -> None:
    mixer, x = build(name, causal, token_shift=causal).double(), torch.randn(2, 21, 16, dtype=torch.float64)
    parts = opened(mixer, x)
    torch.testing.assert_close(x + added(parts), mixer(x), atol=1e-6, rtol=0)
    values = parts.values.unflatten(-1, (parts.n_heads, -1)).transpose(1, 2)
    for part in parts.parts:
        weights = parts.weights(part)
        assert weights.shape == (2, parts.n_heads, 21, 21)
        torch.testing.assert_close(
            (weights @ values).transpose(1, 2).flatten(2), parts.read(part, parts.values), atol=1e-6, rtol=0
        )
        if causal:
            torch.testing.assert_close(weights.triu(1), torch.zeros_like(weights), atol=1e-9, rtol=0)
    assert (parts.parts == ("local", "global")) == (mixer.name in BOTH)


@pytest.mark.parametrize(
    ("name", "causal", "prefix"),
    [("flash", False, None), ("flash, normalization=paper", True, None), ("flash, normalization=paper_sum", True, 11)],
)
def test_the_parts_of_flash_are_those_of_its_definition(name: str, causal: bool, prefix: int | None) -> None:
    mixer, x = build(name, causal).double(), torch.randn(2, 21, 16, dtype=torch.float64)
    assert isinstance(mixer, FLASH)
    lengths = None if prefix is None else torch.tensor([prefix, 0])
    parts = opened(mixer, x, lengths)
    set_backend(mixer, "oracle")
    torch.testing.assert_close(x + added(parts), mixer(x, prefix_lengths=lengths), atol=1e-6, rtol=0)

    batch = mixer.describe(x.shape, prefix_lengths=lengths, device=x.device)
    x = batch.pack(x)
    _, v, maps = mixer.split(mixer.to_gate_value_base(mixer.norm(x)), batch.rotations)
    heads, nothing = Heads(*maps, v), torch.zeros_like(maps[0])
    bias = mixer.chunk_bias(batch)
    silent = None if bias is None else torch.zeros_like(bias)  # relu(0)^2 is zero
    across = attend(heads._replace(q_quad=nothing), silent, batch, mixer.options)
    near = attend(heads._replace(q_lin=nothing), bias, batch, mixer.options)
    torch.testing.assert_close(parts.read("global", v), across, atol=1e-9, rtol=0)
    torch.testing.assert_close(parts.read("local", v), near, atol=1e-9, rtol=0)


def test_a_prefix_is_read_in_both_directions_by_gau_too() -> None:
    mixer, x = build("gau", causal=True).double(), torch.randn(1, 12, 16, dtype=torch.float64)
    assert isinstance(mixer, GAU)
    prefix = torch.tensor([5])
    parts = opened(mixer, x, prefix)
    torch.testing.assert_close(x + added(parts), mixer(x, prefix_lengths=prefix), atol=1e-6, rtol=0)
    weights = parts.weights("attention")[0, 0]
    assert (weights[:5, :5].triu(1) != 0).any()
    assert not weights[5:].triu(6).any()


def test_a_mixer_whose_attention_has_no_weights_says_why() -> None:
    mixer, x = build("combiner", causal=True).double(), torch.randn(1, 12, 16, dtype=torch.float64)
    with pytest.raises(LineartimeError, match="Combiner cannot show attention weights: the keys of its summaries depend on"):
        opened(mixer, x)


def test_packs_and_tokens_of_another_width_are_named() -> None:
    mixer, x = build("flash", causal=True).double(), torch.randn(1, 12, 16, dtype=torch.float64)
    pack = mixer.describe(x.shape, cu_seqlens=torch.tensor([0, 5, 12]), device=x.device)
    with pytest.raises(ArgumentError, match="batch has padding or packed documents, but must not: open one text at a time"):
        mixer.open(x, pack)
    with pytest.raises(ArgumentError, match=r"x has shape \[1, 12, 8\], but must be \[B, T, d_model\] with d_model = 16"):
        mixer.open(x[..., :8], mixer.describe(x.shape, device=x.device))


@pytest.mark.parametrize("name", [name for name, causal in OPENED if causal])
def test_the_global_state_has_a_constant_size(name: str) -> None:
    mixer, x = build(name, causal=True, token_shift=name == "flash").double(), torch.randn(2, 21, 16, dtype=torch.float64)
    state = mixer.init_state(2)
    first = mixer.global_state(state)
    _, state = mixer.extend(x, state)
    last = mixer.global_state(state)
    assert (first is None) == (last is None)
    if first is not None and last is not None:
        assert first.shape == last.shape
        assert not first.any()
        assert last.any()
    elif mixer.name in BOTH:
        pytest.fail(f"{name} has a global part and no global state")
