"""Today's linear models against flash-linear-attention's plain functions, and Mamba-2 against transformers.

How they differ, and what is done about it here:
- The functions of flash-linear-attention compute in float32, and have the scale 1 / sqrt(s) inside. Its layers need a GPU.
- That of the delta rule takes heads before tokens, others after them.
- The Mamba-2 of transformers has one projection for the gate, what is convolved and the steps, a convolution with a bias, and
  values before keys and queries in it: its weights are arranged here, and the bias is 0.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.peers.packages import peer, randomized
from torch import Tensor

from lineartime.baselines import GLA, RWKV7, DeltaNet, GatedDeltaNet, Mamba2, RetNet
from lineartime.baselines.recurrence import RecurrentMixer, Tokens

# flash-linear-attention warns when it is imported without a GPU, and what it imports warns too
pytestmark = pytest.mark.filterwarnings("ignore")
D_MODEL, HEADS, LENGTH = 16, 2, 70


def read(mixer: Any) -> tuple[Tokens, Tensor]:
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


@torch.no_grad()
def test_retention_is_that_of_flash_linear_attention() -> None:
    x, out = read(RetNet)
    scale = (D_MODEL // HEADS) ** 0.5
    close(by_token(out), peer("fla.ops.retention.naive").naive_retention(x.q * scale, x.k, x.v))


@torch.no_grad()
def test_gated_linear_attention_is_that_of_flash_linear_attention() -> None:
    x, out = read(GLA)
    inputs = (by_token(each) for each in (x.q * x.q.shape[-1] ** 0.5, x.k, x.v, x.g))
    close(out, peer("fla.ops.gla.naive").naive_recurrent_gla(*inputs)[0])


@torch.no_grad()
def test_delta_rule_is_that_of_flash_linear_attention() -> None:
    x, out = read(DeltaNet)
    assert x.b is not None
    beta = x.k.norm(dim=-1)  # keys have unit length
    theirs = peer("fla.ops.delta_rule.naive").delta_rule_recurrence(x.q * x.q.shape[-1] ** 0.5, x.b, x.v, beta)[0]
    close(by_token(out), theirs)


@torch.no_grad()
def test_gated_delta_rule_is_that_of_flash_linear_attention() -> None:
    x, out = read(GatedDeltaNet)
    assert x.b is not None
    q, k, v, beta, g = (by_token(each) for each in (x.q, x.b, x.v, x.k.norm(dim=-1, keepdim=True), x.g))
    beta, g = beta[..., 0], g[..., 0]
    q = q * q.shape[-1] ** 0.5
    fla = peer("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    close(out, fla(q, k, v, beta=beta, g=g)[0])


@torch.no_grad()
def test_rule_of_rwkv7_is_that_of_flash_linear_attention() -> None:
    x, out = read(RWKV7)
    assert x.a is not None
    assert x.b is not None
    # there, alpha is what the state is read by, and beta what that is written to
    theirs = peer("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    scale = x.q.shape[-1] ** 0.5
    close(by_token(out), theirs(x.q * scale, x.k, x.v, x.b, x.a, x.g)[0])


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
