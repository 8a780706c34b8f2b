"""The options that only checkpoints of other packages need."""

from typing import Any

import pytest
import torch
from tests.peers.packages import randomized

from lineartime.errors import ArgumentError
from lineartime.foreign.mixers import BucketBias, ForeignFLASH, ForeignGAU, distance_buckets, post_norm
from lineartime.layers import GAU, GLU, MLP, set_backend


def test_buckets_of_distances_are_those_of_t5() -> None:
    """Also where the logarithm of a distance is exactly at a border, as at powers of two."""
    distances = torch.tensor([0, 1, 7, 8, 11, 12, 15, 16, 31, 32, 63, 64, 90, 91, 127, 128, 10_000])
    both_ways = torch.tensor([0, 1, 7, 8, 8, 9, 9, 10, 11, 12, 13, 14, 14, 15, 15, 15, 15])
    assert torch.equal(distance_buckets(-distances, causal=False), both_ways)
    assert torch.equal(distance_buckets(distances[1:], causal=False), both_ways[1:] + 16)
    causal = torch.tensor([0, 1, 7, 8, 11, 12, 15, 16, 21, 21, 26, 26, 29, 29, 31, 31, 31])
    assert torch.equal(distance_buckets(-distances, causal=True), causal)
    assert not distance_buckets(distances, causal=True).any()
    bias = BucketBias(causal=False)  # which has no limit
    assert torch.equal(bias(300)[300:], bias.values[distance_buckets(torch.arange(1, 300), causal=False)])
    assert torch.equal(bias(10_000)[9_700:-9_700], bias(300))


def test_options_that_cannot_be_are_named() -> None:
    for rotary_width in (0, 3, 6):
        with pytest.raises(ArgumentError, match=f"rotary_width is {rotary_width}, but must be an even number from 2 to 4"):
            ForeignGAU(8, d_qk=4, rotary_width=rotary_width)
    with pytest.raises(ArgumentError, match="bias_form is 'table', but must be one of 'auto', 'buckets'"):
        ForeignGAU(8, bias_form="table")  # type: ignore[arg-type]


@pytest.mark.parametrize(("layer", "causal"), [(ForeignGAU, False), (ForeignFLASH, False), (ForeignFLASH, True)])
def test_every_form_rotates_the_same_features_and_has_the_same_buckets(layer: Any, causal: bool) -> None:
    built = randomized(layer(8, d_qk=6, causal=causal, rotary_width=2, bias_form="buckets"))
    x = torch.randn(2, 300, 8, dtype=torch.float64)
    outputs = []
    for backend in ("torch", "auto"):
        set_backend(built, backend)  # type: ignore[arg-type]
        outputs.append(built(x))
    torch.testing.assert_close(*outputs, atol=1e-10, rtol=0)
    whole = layer(8, d_qk=6, causal=causal, bias_form="buckets").double()
    whole.load_state_dict(built.state_dict())
    assert not torch.allclose(whole(x), outputs[0])


@pytest.mark.parametrize("layer", [GAU, MLP, GLU])
def test_a_norm_behind_the_residual_leaves_the_input_of_the_layer_unnormed(layer: Any) -> None:
    before, after = layer(8, norm="scalenorm"), post_norm(layer)(8, norm="scalenorm", norm_eps=1e-12)
    after.load_state_dict(before.state_dict())
    x = torch.randn(1, 5, 8)
    x = x * x.square().mean(-1, keepdim=True).rsqrt()  # which a norm leaves as it is
    torch.testing.assert_close(after(x), after.norm(before(x)))
    assert repr(after).startswith(f"PostNorm{layer.__name__}(")
