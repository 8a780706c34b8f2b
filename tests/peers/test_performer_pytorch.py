"""Linear attentions against performer-pytorch.

How it differs, and what is done about it here:
- It divides queries and keys by h^(1/4) before the feature map. Ours are not divided: its weights are multiplied by h^(1/4).
- It projects features at random. Performer in the comparison of the FLASH paper does not: its projection is the identity.
- It adds 1e-6 to the sum of the keys in the causal form, which is 0 here.
- Its causal efficient attention, softmax(q) exp(k), divides by one sum for all features. Ours divides each feature by its own,
  which restricts the published formula to the prefix: only the bidirectional forms are the same.
- Its angles of rotary positions are float32, and it rotates neighbouring features instead of halves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.peers.packages import interleaved, peer, randomized
from torch import Tensor, nn

from lineartime.baselines import Efficient, LinearELU, Performer

D_MODEL, HEADS, HEAD_DIM = 24, 3, 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:The distutils package is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:distutils Version classes are deprecated:DeprecationWarning"),
]


def copied(ours: Any, theirs: Any, weight_of_qk: Callable[[Tensor], Tensor]) -> Any:
    """Theirs with the weights of ours; queries and keys are made by weights that `weight_of_qk` has changed."""
    weights = {"to_out.weight": ours.to_output.weight, "to_out.bias": ours.to_output.bias}
    for kind in ("weight", "bias"):
        q, k, v = getattr(ours.to_qkv, kind).chunk(3)
        weights |= {f"to_q.{kind}": weight_of_qk(q), f"to_k.{kind}": weight_of_qk(k), f"to_v.{kind}": v}
    weights["fast_attention.projection_matrix"] = torch.eye(HEAD_DIM)
    theirs.double().load_state_dict(weights)
    return theirs


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("system", "feature"), [(Performer, F.relu), (LinearELU, lambda x: F.elu(x) + 1 - 1e-3)], ids=["performer", "linear-elu"]
)
def test_linear_attention_is_that_of_performer_pytorch(
    system: type[nn.Module], feature: Callable[[Tensor], Tensor], causal: bool, rope: bool
) -> None:
    package = peer("performer_pytorch.performer_pytorch")
    ours = randomized(system(D_MODEL, n_heads=HEADS, causal=causal, rope=rope))
    theirs = package.SelfAttention(
        D_MODEL,
        causal=causal,
        heads=HEADS,
        dim_head=HEAD_DIM,
        nb_features=HEAD_DIM,
        generalized_attention=True,
        kernel_fn=feature,  # adds 0.001 to it
        qkv_bias=True,
    )
    copied(ours, theirs, lambda weight: HEAD_DIM**0.25 * (interleaved(weight, HEADS) if rope else weight))
    if causal:
        theirs.fast_attention.causal_linear_fn = partial(package.causal_linear_attention_noncuda, eps=0.0)
    x = torch.randn(2, 150, D_MODEL, dtype=torch.float64)
    positions = package.FixedPositionalEmbedding(HEAD_DIM, 150)(x) if rope else None
    expected = x + theirs(ours.norm(x), pos_emb=positions)
    torch.testing.assert_close(ours(x), expected, atol=1e-5 if rope else 1e-10, rtol=0)


def test_efficient_attention_is_that_of_performer_pytorch() -> None:
    package = peer("performer_pytorch.performer_pytorch")
    ours = randomized(Efficient(D_MODEL, n_heads=HEADS, rope=False))
    theirs = package.SelfAttention(
        D_MODEL, heads=HEADS, dim_head=HEAD_DIM, nb_features=HEAD_DIM, no_projection=True, qkv_bias=True
    )
    copied(ours, theirs, lambda weight: weight)
    x = torch.randn(2, 50, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(ours(x), x + theirs(ours.norm(x)), atol=1e-10, rtol=0)
