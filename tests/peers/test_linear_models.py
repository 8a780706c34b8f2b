"""Today's linear models against flash-linear-attention's plain functions, and Mamba-2 against transformers.

How they differ, and what is done about it here:
- The functions of flash-linear-attention compute in float32, and have the scale 1 / sqrt(s) inside. Its layers need a GPU.
- That of the delta rule takes heads before tokens, others after them.
- The Mamba-2 of transformers has one projection for the gate, what is convolved and the steps, a convolution with a bias, and
  values before keys and queries in it: its weights are arranged here, and the bias is 0.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.peers.packages import peer, randomized
from torch import Tensor

from lineartime.baselines import GLA, RWKV7, DeltaNet, GatedDeltaNet, Mamba2, RetNet
from lineartime.baselines.recurrence import RecurrentMixer

# flash-linear-attention warns when it is imported without a GPU, and what it imports warns too
pytestmark = pytest.mark.filterwarnings("ignore")
D_MODEL, HEADS, LENGTH = 16, 2, 70


def read(mixer: Any) -> tuple[Any, Tensor]:
    """What a layer's recurrence reads, in heads of tokens, [1, H, T, ...], and what it returns, [1, T, H, e]."""
    torch.manual_seed(0)
    layer: RecurrentMixer = randomized(mixer(D_MODEL, n_heads=HEADS)).float()
    packing = layer.describe((1, LENGTH, D_MODEL), device=torch.device("cpu"))
    normed = layer.before(torch.randn(LENGTH, D_MODEL))
    own = layer.remember(normed)
    before, _ = packing.earlier(own, layer.recent_shape[0])
    tokens = layer.tokens(normed, layer.project([own, *before]), packing).map(packing.to_rows)
    return tokens.map(lambda each: each.transpose(1, 2)), layer.recur(tokens, None)[0]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


def by_token(x: Tensor) -> Tensor:
    # In flash-linear-attention 0.6.0, some references take [B, T, H, h] and others [B, H, T, h]; none refuses the other.
    return x.transpose(1, 2)


def gated_delta_rule(x: Any) -> Tensor:
    q, k, v, beta, g = (by_token(each) for each in (x.q, x.b, x.v, x.k.norm(dim=-1, keepdim=True), x.g))
    theirs = peer("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    return torch.as_tensor(theirs(q, k, v, beta=beta[..., 0], g=g[..., 0])[0])


# Keys of a delta rule have unit length. In RWKV-7's, alpha is what the state is read by, and beta what that is written to.
THEIRS: dict[Any, Callable[[Any], Tensor]] = {
    RetNet: lambda x: by_token(peer("fla.ops.retention.naive").naive_retention(x.q, x.k, x.v)),
    GLA: lambda x: peer("fla.ops.gla.naive").naive_recurrent_gla(*map(by_token, (x.q, x.k, x.v, x.g)))[0],
    DeltaNet: lambda x: by_token(peer("fla.ops.delta_rule.naive").delta_rule_recurrence(x.q, x.b, x.v, x.k.norm(dim=-1))[0]),
    GatedDeltaNet: gated_delta_rule,
    RWKV7: lambda x: by_token(
        peer("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence(x.q, x.k, x.v, x.b, x.a, x.g)[0]
    ),
}


@pytest.mark.parametrize("mixer", THEIRS)
@torch.no_grad()
def test_recurrence_is_that_of_flash_linear_attention(mixer: Any) -> None:
    x, out = read(mixer)
    close(out, THEIRS[mixer](x._replace(q=x.q * x.q.shape[-1] ** 0.5)))


@torch.no_grad()
def test_mamba2_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    state = 6
    ours = randomized(Mamba2(D_MODEL, n_heads=HEADS, d_state=state)).float()
    for dense in (ours.to_maps, ours.to_gate, ours.to_output):
        dense.bias.zero_()
    module = peer("transformers.models.mamba2.modeling_mamba2")
    config = peer("transformers").Mamba2Config(
        hidden_size=D_MODEL, state_size=state, num_heads=HEADS, head_dim=2 * D_MODEL // HEADS, n_groups=1, chunk_size=16
    )
    theirs: Any = module.Mamba2Mixer(config, layer_idx=0).eval()
    q, k, v = ours.to_maps.weight.split([state, state, 2 * D_MODEL])
    of_q, of_k, of_v = ours.convolution.taps.flip(0).mT.split([state, state, 2 * D_MODEL])
    weights = {
        "in_proj.weight": torch.cat([ours.to_gate.weight, v, k, q, ours.decay.weight]),
        "conv1d.weight": torch.cat([of_v, of_k, of_q])[:, None],
        "conv1d.bias": torch.zeros(2 * D_MODEL + 2 * state),
        "dt_bias": ours.decay.bias,
        "A_log": ours.decay.log_a,
        "D": ours.skip,
        "norm.weight": ours.head_norm.weight,
        "out_proj.weight": ours.to_output.weight,
    }
    theirs.load_state_dict(weights)
    x = torch.randn(2, LENGTH, D_MODEL)
    close(ours(x) - x, theirs(F.layer_norm(x, (D_MODEL,), ours.norm.weight, ours.norm.bias)))
