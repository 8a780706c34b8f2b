"""Attentions against the packages performer-pytorch, reformer-pytorch, linformer and local-attention.

How they differ, and what is done about it here:
- performer-pytorch divides queries and keys by h^(1/4) before the feature map. Ours are not divided: its weights are multiplied
  by h^(1/4). It projects features at random. Performer in the comparison of the FLASH paper does not: its projection is the
  identity. It adds 1e-6 to the sum of the keys in the causal form, which is 0 here. Its causal efficient attention,
  softmax(q) exp(k), divides by one sum for all features. Ours divides each feature by its own, which restricts the published
  formula to the prefix: only the bidirectional forms are the same. Its angles of rotary positions are float32, and it rotates
  neighbouring features instead of halves.
- reformer-pytorch cuts all tokens, sorted by bucket, into chunks, which may hold tokens of several buckets. Ours are cut inside
  each bucket, because the others show a causal token something of the future. The buckets here, which are given, are whole
  numbers of chunks. It divides scores by sqrt(h) once more than ours: its queries are multiplied by sqrt(h). Unless told
  otherwise it reads other buckets in its chunks, and counts a pair once for every round: it is told here.
- The maps of linformer have no biases: ours are zero here. It may share keys and values, or have one head for them, which the
  paper offers and we do not.
- local-attention, whose windows are our chunks, has softmax alone: our quadratic parts take it as their activation, without
  relative bias. Bidirectional, it reads the zeros that it appends to the last window unless a mask forbids it: here one does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.peers.packages import interleaved, peer, randomized
from torch import Tensor, nn

from lineartime.baselines import Efficient, FLASHOverlapping, LinearELU, Linformer, Performer, Reformer, Sparse
from lineartime.ops import MixedChunkOptions, Scales, attend, describe
from lineartime.ops.mixed_chunk import reciprocal

D_MODEL, HEADS, HEAD_DIM, CHUNK = 24, 3, 8, 4

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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("chunks", [1, 3])
def test_attention_in_buckets_is_that_of_reformer_pytorch(
    chunks: int, rounds: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 2 * chunks * CHUNK  # two buckets of as many tokens
    buckets = torch.rand(2, HEADS, rounds, length).argsort(-1) // (length // 2)
    q, v = (torch.randn(2, HEADS, length, HEAD_DIM, dtype=torch.float64) for _ in range(2))
    theirs = peer("reformer_pytorch").LSHAttention(
        bucket_size=CHUNK, n_hashes=rounds, causal=causal, attend_across_buckets=False, allow_duplicate_attention=False
    )
    offsets = torch.arange(rounds)[:, None] * (length // CHUNK)  # it numbers the buckets of all rounds
    monkeypatch.setattr(theirs, "hash_vectors", lambda *_, **__: (buckets + offsets).flatten(2).flatten(0, 1))
    expected = theirs(q.flatten(0, 1) * HEAD_DIM**0.5, v.flatten(0, 1))[0].view_as(v)
    monkeypatch.setattr("lineartime.baselines.reformer.reformer_buckets", lambda *_: buckets)
    layer = Reformer(HEADS * HEAD_DIM, n_heads=HEADS, n_buckets=2, chunk_size=CHUNK, causal=causal)
    out = layer.attend(q, q, v, None)
    torch.testing.assert_close(out, expected, atol=1e-7, rtol=0)  # it adds 1e-9 to the count of rounds


@pytest.mark.parametrize("length", [1, 9, 16])
def test_linformer_is_that_of_the_package(length: int) -> None:
    ours = randomized(Linformer(16, n_heads=2, n_landmarks=5, max_length=16, rope=False))
    nn.init.zeros_(ours.to_qkv.bias)
    theirs = peer("linformer").LinformerSelfAttention(16, 16, k=5, heads=2).double()
    weights = {f"to_{name}.weight": weight for name, weight in zip("qkv", ours.to_qkv.weight.chunk(3), strict=True)}
    weights |= {"proj_k": ours.mix_keys.mT, "proj_v": ours.mix_values.mT}
    theirs.load_state_dict(weights | {f"to_out.{name}": x for name, x in ours.to_output.named_parameters()})
    x = torch.randn(2, length, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), x + theirs(ours.norm(x)), atol=1e-10, rtol=0)


def tokens(length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, length, 8, dtype=torch.float64) for _ in range(3))
    return q, k, v


def near(q: Tensor, k: Tensor, v: Tensor, causal: bool, chunks: int, **options: Any) -> Tensor:
    """Theirs, reading so many chunks on each side that it may look to."""
    theirs = peer("local_attention").LocalAttention(
        CHUNK,
        causal=causal,
        look_backward=chunks,
        look_forward=0 if causal else chunks,
        autopad=True,
        use_rotary_pos_emb=False,
        **options,
    )
    out: Tensor = theirs(q, k, v, mask=torch.ones(q.shape[:2], dtype=torch.bool))
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [8, 18])
def test_quadratic_part_of_flash_with_softmax_is_local_attention_that_may_look_around(length: int, causal: bool) -> None:
    q, k, v = tokens(length)
    packing = describe(v.shape, device=v.device)
    packed = [packing.pack(x) for x in (q, k, v)]
    options = MixedChunkOptions(CHUNK, causal, Scales(q.shape[-1] ** -0.5, reciprocal, reciprocal), "softmax")
    own, _ = attend(*packed[:2], None, None, packed[2], packing, options)
    layer = FLASHOverlapping(8, d_qk=8, chunk_size=CHUNK, causal=causal, activation="softmax", relative_bias=False)
    around, _ = layer.attend_near(packed[0], packed[1], packed[2], packing, None)
    for chunks, out in enumerate((own, around)):
        torch.testing.assert_close(packing.unpack(out), near(q, k, v, causal, chunks), atol=1e-10, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_sparse_attention_is_local_attention_until_the_second_stride(causal: bool) -> None:
    q, k, v = tokens(2 * CHUNK)  # up to here, near tokens and multiples of the stride are all at distances 0 to 4
    out = Sparse(8, n_heads=1, stride=CHUNK, causal=causal).attend(q[:, None], k[:, None], v[:, None], None)[:, 0]
    torch.testing.assert_close(out, near(q, k, v, causal, 1, exact_windowsize=True), atol=1e-10, rtol=0)
