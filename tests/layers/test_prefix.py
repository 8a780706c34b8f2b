"""Layers that read a prefix in both directions and the rest causally."""

from typing import Any

import pytest
import torch
from tests.layers.test_mixer_contract import CAUSAL, CHUNK, D_MODEL, ONE_OF_EACH, fresh
from tests.layers.test_mixer_contract import build as mixer_of
from torch import Tensor

from lineartime.errors import ArgumentError, LineartimeError
from lineartime.layers import FLASH, GAU
from lineartime.layers.mixer import READ_PREFIX, Mixer

LENGTH = 2 * CHUNK + 3
READERS = [name for name in CAUSAL if mixer_of(name, True).reads_prefix]
every_case = pytest.mark.parametrize("name", READERS)
PREFIXES = torch.tensor([0, 1, CHUNK + 3, LENGTH])  # nothing, a token, into a chunk, everything


def build(name: str, causal: bool = True) -> Mixer:
    return mixer_of(name, causal).double()


def tokens(batch: int = len(PREFIXES), length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, D_MODEL, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-9)


@every_case
def test_prefix_reads_both_ways_over_itself_and_the_rest_causally_over_everything(name: str) -> None:
    layer, x = build(name), tokens()
    out = layer(x, prefix_lengths=PREFIXES)
    causal, both_ways = layer(x), build(name, causal=False)
    close(out[0], causal[0])
    # A bidirectional one has other buckets, or divides by its length: see below.
    differs = "buckets" in name or (name.startswith("gau") and "paper" in name)
    for row, length in enumerate(PREFIXES.tolist()):
        close(out[row, length:], causal[row, length:])
        if not differs:
            close(out[row : row + 1, :length], both_ways(x[row : row + 1, :length]))


def test_published_divisor_is_that_of_the_causal_layer_inside_a_prefix_too() -> None:
    options: dict[str, Any] = {"d_qk": 4, "normalization": "paper", "relative_bias": False, "dtype": torch.float64}
    layer, both_ways = GAU(D_MODEL, causal=True, max_length=20, **options), GAU(D_MODEL, **options)
    torch.nn.init.normal_(layer.gamma)
    both_ways.load_state_dict(layer.state_dict())
    x = tokens(1)
    added = (layer(x, prefix_lengths=torch.tensor([7])) - x)[:, :7]
    close(added * 20**2, (both_ways(x[:, :7]) - x[:, :7]) * 7**2)


@pytest.mark.parametrize("name", ["flash", "gau, max_length=128", "attention"])  # the base does it alone
def test_left_padded_prefixes_of_different_lengths_begin_streams_as_each_would_alone(name: str) -> None:
    layer, x, lengths = build(name), tokens(), torch.tensor([0, 1, 9, 6])
    mask = torch.arange(9) >= 9 - lengths[:, None]
    padded = torch.full_like(x[:, :9], torch.nan)
    for row, length in enumerate(lengths.tolist()):
        padded[row, 9 - length :] = x[row, :length]
    out, state = layer.read_prefix(padded, mask)
    assert torch.equal(state.position, lengths)
    assert not out[~mask].any()
    rest, _ = layer.extend(torch.stack([x[row, length : length + 6] for row, length in enumerate(lengths)]), state)
    for row, length in enumerate(lengths.tolist()):
        alone = layer(x[row : row + 1, : length + 6], prefix_lengths=lengths[row : row + 1])[0]
        close(torch.cat([out[row, 9 - length :], rest[row]]), alone)


def test_layers_without_a_prefix_form_and_layers_that_look_both_ways_say_so() -> None:
    lengths, x = torch.tensor([1]), torch.zeros(1, 3, D_MODEL)
    for name in set(ONE_OF_EACH) - set(READERS):
        layer = fresh(name, causal=name in CAUSAL)
        message = rf"{type(layer).__name__} does not support prefixes: only {READ_PREFIX} do"
        for arguments, read in (({"prefix_lengths": lengths}, layer), ({}, layer.read_prefix)):
            with pytest.raises(LineartimeError, match=message):
                read(x, **arguments)
    layer = FLASH(D_MODEL, d_qk=4, chunk_size=CHUNK)
    for read in (lambda: layer(x, prefix_lengths=lengths), lambda: layer.read_prefix(x)):
        with pytest.raises(ArgumentError, match="causal is False, but prefixes need a causal FLASH: build it with causal=True"):
            read()
