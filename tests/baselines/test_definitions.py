"""Every baseline among the heads against its definition, and what several of them promise alike: C = 4."""

import math
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import assert_same_function
from tests.pairs import every_pair
from torch import Tensor

from lineartime import baselines
from lineartime.baselines import flowformer, landmarks, reformer, sparse
from lineartime.models.systems import SYSTEMS
from lineartime.ops.positions import rope

CHUNK, LONGEST = 4, 40

# The definition of a layer's head: the layer, the number of the head, its queries, keys and values [T, h] -> [T, h].
Definition = Callable[..., Tensor]


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, reads: Callable[[int, int], bool], similarity: Any = None
) -> Tensor:
    """Of each t to the j that it reads: by softmax, or by similarities of a query, a key and t - j, divided by their sum."""
    tokens = range(len(v))
    visible = torch.tensor([[(j <= t or not causal) and reads(t, j) for j in tokens] for t in tokens])
    if similarity is None:
        return F.scaled_dot_product_attention(q, k, v, visible)
    rows = [torch.stack([similarity(q[t], k[j], t - j) for j in tokens]) for t in tokens]
    weights = torch.stack(rows).where(visible, 0.0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v


def reading(reads: Callable[[Any, int, int], bool]) -> Definition:
    """Softmax attention of each i to the j that a layer lets it read."""
    return lambda layer, _, q, k, v: attention(q, k, v, layer.causal, lambda i, j: reads(layer, i, j))


def similar(similarity: Callable[..., Tensor]) -> Definition:
    """Linear attention, by the similarity of a query, a key and their distance."""
    return lambda layer, _, q, k, v: attention(q, k, v, layer.causal, lambda *_: True, similarity)


def product(features: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, _: features(q) @ features(k)


def cosine(q: Tensor, k: Tensor, distance: int) -> Tensor:
    return q.clamp(min=0) @ k.clamp(min=0) * math.cos(math.pi / 2 * distance / LONGEST)


def relu_features(x: Tensor) -> Tensor:
    return x.clamp(min=0) + 1e-3


def elu_features(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def taylor_features(x: Tensor) -> Tensor:
    return torch.cat([x.new_ones(1), x / x.norm()])


def scheme(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    similarity = {"relu": product(relu_features), "elu": product(elu_features), "cos": cosine}[layer.features]
    reach = int(layer.local == "overlapping")
    near = attention(q, k, v, layer.causal, lambda i, j: abs(i // CHUNK - j // CHUNK) <= reach)
    return near + attention(q, k, v, layer.causal, lambda i, j: i // CHUNK != j // CHUNK, similarity)


def bigbird(layer: Any, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blocks = torch.arange(-(-len(q) // layer.block_size))
    chosen, there = layer.choose(blocks, blocks + 1 if layer.causal else torch.full_like(blocks, len(blocks)))
    drawn = [chosen[head, g][there[head, g]].tolist() for g in blocks]

    def reads(i: int, j: int) -> bool:
        g, other = i // layer.block_size, j // layer.block_size
        return abs(g - other) <= 1 or other < layer.n_global or other in drawn[g] or g < layer.n_global

    return attention(q, k, v, layer.causal, reads)


def explicit_topk(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def reads(i: int, j: int) -> bool:
        scores = k[: i + 1 if layer.causal else None] @ q[i]
        return bool(scores[j] >= scores.sort(descending=True).values[: layer.n_largest][-1])

    return attention(q, k, v, layer.causal, reads)


def combiner(layer: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Of all heads of a document, [H, T, h], and its normed tokens [T, d]."""
    t = torch.arange(len(x))
    row, column = (t // CHUNK == (t // CHUNK)[:, None]), (t % CHUNK == (t % CHUNK)[:, None])
    o = F.scaled_dot_product_attention(q, k, v, row)
    k_sum = layer.key_summary(o.transpose(0, 1).flatten(1), x, t).transpose(0, 1)
    visible = torch.cat([row, column & ~row], 1)
    visible = visible.where(t.repeat(2) <= t[:, None], False) if layer.causal else visible
    return F.scaled_dot_product_attention(q, torch.cat([k, k_sum], 1), torch.cat([v, o], 1), visible)


def combiner_fixed(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chunks = list(zip(q.split(CHUNK), k.split(CHUNK), v.split(CHUNK), strict=True))
    k_bar = torch.stack([keys.amax(0) for _, keys, _ in chunks])
    v_bar = torch.cat([F.scaled_dot_product_attention(queries.amax(0, True), *read) for queries, *read in chunks])
    t, g = torch.arange(len(v)), torch.arange(len(chunks))
    own = (t // CHUNK)[:, None]
    near, far = own == t // CHUNK, own != g
    if layer.causal:
        near, far = near & (t <= t[:, None]), g < own
    return F.scaled_dot_product_attention(q, torch.cat([k, k_bar]), torch.cat([v, v_bar]), torch.cat([near, far], 1))


def efficient(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, position, rows = k.clamp(-20, 20), torch.arange(len(v)), []
    for t in range(len(v)):
        visible = slice(0, t + 1) if layer.causal else slice(None)
        query, keys = q[t].softmax(0), k[visible].softmax(0)
        if layer.rotated == "features":
            query, keys = rope(query, position[t]), rope(keys, position[visible])
        rows.append(query @ (keys.mT @ v[visible]))
    return torch.stack(rows)


def flows(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a, b, so_far = q.sigmoid(), k.sigmoid(), torch.ones(len(v), len(v)).to(v)
    so_far = so_far.tril() if layer.causal else so_far
    count = so_far.sum(1) if layer.causal else 1

    def flow(x: Tensor, others: Tensor) -> Tensor:
        return ((x + 1e-6) * (so_far @ others + 1e-6)).sum(1) / count

    incoming, outgoing = flow(a, b), flow(b, a)
    sinks, sources = flow(a, b / outgoing[:, None]), flow(b, a / incoming[:, None])
    strength = sources.clamp(max=flowformer.MAX_FLOW).exp()
    share = strength / (so_far @ strength) * so_far.sum(1)
    weights = (a @ b.mT) * so_far / (incoming * count)[:, None]
    return sinks.sigmoid()[:, None] * (weights * share) @ v


def mc_tfm(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    own = torch.arange(len(v)) // CHUNK
    far = (own < own[:, None] if layer.causal else own != own[:, None]).to(v)
    linear = (q @ k.mT / q.shape[-1] ** 0.5) * far / far.sum(1, keepdim=True).clamp(min=1)
    return linear @ v + attention(q, k, v, layer.causal, lambda i, j: i // CHUNK == j // CHUNK)


def linformer(layer: Any, _: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys, values = (mix[:, : len(x)] @ x for mix, x in ((layer.mix_keys, k), (layer.mix_values, v)))
    return (q @ keys.mT / q.shape[-1] ** 0.5).softmax(-1) @ values


def nystromformer(layer: Any, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def softmax(q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)

    out, m, reach = softmax(q, k) @ v, layer.n_landmarks, layer.convolution // 2
    if len(v) > m:
        ends = [landmark * len(v) // m for landmark in range(m + 1)]
        q_l, k_l = (torch.stack([x[a:b].mean(0) for a, b in pairwise(ends)]) for x in (q, k))
        out = softmax(q, k_l) @ landmarks.pseudo_inverse(softmax(q_l, k_l)) @ softmax(q_l, k) @ v
    for i in range(len(v) if layer.convolution else 0):
        near = [j for j in range(len(v)) if abs(i - j) <= reach]
        out = out.index_add(0, torch.tensor([i]), sum(layer.kernel[head, j - i + reach] * v[j] for j in near)[None])
    return out


def reformed(layer: Any, head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for i in range(len(q)):
        reads: list[int] = []
        for bucket in reformer.reformer_buckets(k[None, None], layer.directions[head : head + 1])[0, 0].tolist():
            members = [j for j in range(len(q)) if bucket[j] == bucket[i]]
            chunk = members.index(i) // CHUNK
            near = [j for rank, j in enumerate(members) if rank // CHUNK in (chunk - 1, chunk)]
            reads += [j for j in near if (j <= i or not layer.causal) and j not in reads]
        scores = [q.new_tensor(-1e5) if j == i else q[i] @ q[j] / q[j].norm() for j in reads]
        rows.append(torch.stack(scores).softmax(0) @ v[reads])
    return torch.stack(rows)


strided = reading(lambda layer, i, j: abs(i - j) < layer.stride or (i - j) % layer.stride == 0)
longformer = reading(lambda layer, i, j: abs(i - j) < layer.window or min(i, j) < layer.n_global)
chunked = {"chunk_size": CHUNK}
ROWS: list[tuple[Any, dict[str, Any], Definition]] = [
    (baselines.BigBird, {"block_size": 2, "n_global": 1, "n_random": 2}, bigbird),
    (baselines.BigBird, {"block_size": 1, "n_global": 2, "n_random": 3}, bigbird),
    (baselines.BigBird, {"block_size": 30, "n_global": 1, "n_random": 1}, bigbird),
    (baselines.CombinerFixed, chunked, combiner_fixed),
    (baselines.CosFormer, {"max_length": LONGEST}, similar(cosine)),
    (baselines.Efficient, {}, efficient),
    (baselines.ExplicitTopK, {"n_largest": 1}, explicit_topk),
    (baselines.ExplicitTopK, {"n_largest": 4}, explicit_topk),
    (baselines.Flowformer, {}, flows),
    (baselines.LinearELU, {}, similar(product(elu_features))),
    (baselines.LinearTaylor, {}, similar(product(taylor_features))),
    (baselines.Linformer, {"n_landmarks": 3, "max_length": LONGEST}, linformer),
    (baselines.Longformer, {"window": 1, "n_global": 1}, longformer),
    (baselines.Longformer, {"window": 4, "n_global": 9}, longformer),
    (baselines.MCTFM, chunked, mc_tfm),
    (baselines.MixedChunk, {**chunked, "features": "relu"}, scheme),
    (baselines.MixedChunk, {**chunked, "features": "elu", "local": "overlapping"}, scheme),
    (baselines.MixedChunk, {**chunked, "features": "cos", "max_length": LONGEST}, scheme),
    (baselines.Nystromformer, {"n_landmarks": 4, "convolution": 5}, nystromformer),
    (baselines.Nystromformer, {"n_landmarks": 4, "convolution": 0}, nystromformer),
    (baselines.Performer, {"causal_sums": "prefix"}, similar(product(relu_features))),
    (baselines.Performer, {"causal_sums": "matmul"}, similar(product(relu_features))),
    (baselines.Performer, {"causal_sums": "chunked"}, similar(product(relu_features))),
    (baselines.Reformer, {**chunked, "n_buckets": 2, "n_rounds": 1}, reformed),
    (baselines.Reformer, {**chunked, "n_buckets": 4, "n_rounds": 3}, reformed),
    (baselines.Sparse, {"stride": 1}, strided),
    (baselines.Sparse, {"stride": 4}, strided),
]
CASES = {f"{mixer.__name__} {options}": (mixer, options, oracle) for mixer, options, oracle in ROWS}


def test_every_system_that_is_compared_can_be_imported_by_its_name() -> None:
    mixers = {system.mixer for system in SYSTEMS.values() if system.mixer.__module__.startswith("lineartime.baselines")}
    assert len(mixers) > 20
    assert {mixer.__name__ for mixer in mixers} <= set(dir(baselines))


@every_pair(name=list(CASES), causal=[False, True], length=[1, 4, 5, 17])
def test_values_and_gradients_are_the_definition(name: str, causal: bool, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each head of two rows, of which the second is half padding."""
    monkeypatch.setattr(flowformer, "MAX_FLOW", 1.0)  # the bound is reached by about half of the keys
    mixer, options, oracle = CASES[name]
    layer = mixer(12, n_heads=2, causal=causal and mixer.why_not_causal is None, **options).double()
    check(layer, oracle, length)


SUMS = ["Efficient {}", "Flowformer {}", *(name for name in CASES if name.startswith("Performer"))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_several_chunks_are_the_definition(name: str, causal: bool) -> None:
    mixer, options, oracle = CASES[name]
    check(mixer(12, n_heads=2, causal=causal, **options).double(), oracle, 130)


def check(layer: Any, oracle: Definition, length: int) -> None:
    lengths = [length, (length + 1) // 2]
    real = torch.arange(length) < torch.tensor(lengths)[:, None]
    # Some feature of every query and key is positive: a query that is similar to no key has no mean.
    shifted = [torch.randn(2, 2, length, 6).double() + torch.tensor([5.0, 0, 0, 0, 0, 0]) * part for part in (1, 1, 0)]
    inputs = [x.requires_grad_() for x in shifted]
    packing = layer.describe((2, length), real, device=real.device)
    read, _ = layer.attend_heads(tuple(packing.pack(x.transpose(1, 2)) for x in inputs), packing, None)
    fast = packing.unpack(read).unflatten(-1, (2, 6)).transpose(1, 2)
    rows = [
        torch.stack([oracle(layer, head, *(x[row, head, :n] for x in inputs)) for head in range(2)])
        for row, n in enumerate(lengths)
    ]
    exact = torch.stack([F.pad(row, (0, 0, 0, length - row.shape[1])) for row in rows])
    torch.testing.assert_close(fast, exact, atol=1e-10, rtol=0)
    direction, wanted = torch.randn_like(exact), (*inputs, *layer.parameters())
    gradients = [torch.autograd.grad((out * direction).sum(), wanted, materialize_grads=True) for out in (fast, exact)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=0)


BOUNDS = [
    (sparse, "GATHERED", baselines.Sparse, 12),
    (sparse, "COMPARED", baselines.ExplicitTopK, 50),
    (reformer, "COMPARED", baselines.Reformer, 115),
]


@pytest.mark.parametrize(("module", "bound", "mixer", "few"), BOUNDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_long_prompt_is_read_in_parts_of_bounded_memory(
    module: ModuleType, bound: str, mixer: Any, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = mixer(12, n_heads=2, causal=True).double(), torch.randn(2, 23, 12, dtype=torch.float64)
    for at_a_time in (1, few):
        monkeypatch.setattr(module, bound, at_a_time)
        first, state = layer.extend(x[:, :2], None)
        rest, _ = layer.extend(x[:, 2:], state)
        torch.testing.assert_close(torch.cat([first, rest], 1), layer(x), atol=1e-10, rtol=0)


# After 83 tokens: [B, H, ...] for two heads of width 8, chunks of 8 and windows of 4.
KEPT: list[tuple[Any, dict[str, Any], list[tuple[int, ...]]]] = [
    (baselines.Combiner, {"chunk_size": 8}, [(10, 8, 8)] * 2 + [(8, 8)] * 3),  # two vectors for each token of closed chunks
    (baselines.CombinerFixed, {"chunk_size": 8}, [(10, 8)] * 2 + [(8, 8)] * 2 + [(8,)]),  # a summary for each closed chunk
    (baselines.MCTFM, {"chunk_size": 8}, [(8, 8), (1, 8, 8), (8, 8)]),  # keys of the open chunk once
    (baselines.MixedChunk, {"chunk_size": 8}, [(8, 9), (8, 8), (8, 8)]),
    (baselines.MixedChunk, {"chunk_size": 8, "local": "overlapping"}, [(8, 9), (16, 8), (16, 8)]),
    (baselines.Longformer, {"window": 4, "n_global": 6}, [(6, 8)] * 2 + [(3, 8)] * 2),
]


@pytest.mark.parametrize(("mixer", "options", "kept"), KEPT)
def test_stream_keeps_no_more_than_this(mixer: Any, options: dict[str, Any], kept: list[tuple[int, ...]]) -> None:
    layer = mixer(16, n_heads=2, causal=True, **options)
    _, state = layer.extend(torch.randn(1, 83, 16), None)
    assert [tuple(x.shape[2:]) for x in state.tensors() if x.shape[:2] == (1, 2)] == kept


@pytest.mark.parametrize("mixer", [baselines.CosFormer, baselines.Linformer, baselines.MixedChunk])
def test_only_the_longest_sequence_has_to_fit(mixer: Any) -> None:
    options: dict[str, Any] = {"features": "cos"} if mixer is baselines.MixedChunk else {}
    layer = mixer(16, n_heads=2, max_length=8, causal=mixer is not baselines.Linformer, **options)
    assert layer.longest_sequence == 8
    message = f"max_length is 8 in this {mixer.__name__}, but the sequence has 9 tokens"
    for length, ends in ((9, None), (10, torch.tensor([0, 1, 10]))):
        with pytest.raises(ValueError, match=message):
            layer(torch.zeros(1, length, 16), cu_seqlens=ends)
    assert layer(torch.zeros(1, 10, 16), cu_seqlens=torch.tensor([0, 2, 10])).shape == (1, 10, 16)
    if layer.causal:
        _, state = layer.extend(torch.zeros(1, 8, 16), None)
        with pytest.raises(ValueError, match=message):
            layer.extend(torch.zeros(1, 1, 16), state)


# What one mechanism promises ------------------------------------------------------------------------------------------


def test_query_that_is_similar_to_no_key_reads_nothing() -> None:
    q, k = torch.tensor([[[[1.0, -1.0]]]]), torch.tensor([[[[-1.0, 1.0]]]])
    assert not baselines.CosFormer(2, n_heads=1, max_length=4).attend(q, k, torch.ones(1, 1, 1, 2), None).any()


@pytest.mark.parametrize("causal", [False, True])
def test_equal_scores_are_read_alike(causal: bool) -> None:
    zeros, values = torch.zeros(1, 1, 7, 4), torch.randn(1, 1, 7, 4)
    out = baselines.ExplicitTopK(4, n_heads=1, n_largest=2, causal=causal).attend(zeros, zeros, values, None)
    torch.testing.assert_close(out[:, :, -1], values.mean(2))


@pytest.mark.parametrize("causal", [False, True])
def test_flows_that_vanish_leave_everything_finite(causal: bool) -> None:
    q = torch.full((1, 1, 5, 8), -200.0, requires_grad=True)  # whose sigmoid is zero in float32
    out = baselines.Flowformer(8, n_heads=1, causal=causal).attend(q, q, torch.randn(1, 1, 5, 8), None)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


def test_far_chunk_with_small_similarities_is_not_lost_in_those_of_the_own_chunk() -> None:
    """Not the total without the own chunk: its rounding is larger than what the other chunk adds."""
    q, v = torch.ones(1, 1, 8, 2), torch.randn(1, 1, 8, 2)
    k = torch.cat([torch.full((1, 1, 4, 2), -30.0), torch.full((1, 1, 4, 2), 1e8)], 2)
    layer = baselines.MixedChunk(2, n_heads=1, chunk_size=4, features="relu")
    out = layer.attend(q, k, v, None) - F.scaled_dot_product_attention(q, k[:, :, 4:], v[:, :, 4:])
    torch.testing.assert_close(out[:, :, 4:], v[:, :, :4].mean(2, keepdim=True).expand(-1, -1, 4, -1), atol=1e-4, rtol=0)


def test_pseudo_inverse_of_a_row_is_that_of_linear_algebra() -> None:
    a = (2 * torch.eye(8, dtype=torch.float64) + torch.randn(3, 2, 8, 8, dtype=torch.float64)).softmax(-1)
    a = (a + torch.eye(8)) / 2
    torch.testing.assert_close(landmarks.pseudo_inverse(a), torch.linalg.pinv(a), atol=1e-6, rtol=0)


def drawn_blocks(count: int, causal: bool = True) -> list[list[list[int]]]:
    """The random blocks of every block of a document with so many, for both heads; the first two are global."""
    layer, block = baselines.BigBird(2, n_heads=1, n_global=2, n_random=3), torch.arange(count)
    layer.seeds = torch.tensor([1, 2**32 - 1])
    chosen, there = layer.choose(block, block + 1 if causal else torch.full_like(block, count))
    return [[chosen[head, g][there[head, g]].tolist() for g in range(count)] for head in range(2)]


@every_pair(causal=[False, True], count=[1, 2, 5, 7, 40])
def test_random_blocks_are_distinct_and_neither_near_nor_global(causal: bool, count: int) -> None:
    for head in drawn_blocks(count, causal):
        for g, chosen in enumerate(head):
            others = [b for b in range(2, g + 1 if causal else count) if abs(b - g) > 1]
            assert set(chosen) <= set(others)
            assert len(set(chosen)) == len(chosen) == min(3, len(others))


def test_every_other_block_is_drawn_about_as_often() -> None:
    last = torch.tensor([21])  # its others: blocks 1 to 19 of a causal row
    layer = baselines.BigBird(2, n_heads=1, n_global=1, n_random=1)
    layer.seeds = torch.randint(2**32, (4000,))
    chosen, there = layer.choose(last, last + 1)
    assert there.all()
    counts = chosen.flatten().bincount(minlength=20)[1:]
    assert len(counts) == 19
    assert ((counts > 150) & (counts < 280)).all()  # 210 each


@every_pair(causal=[False, True], length=[1, 4, 5, 17])
def test_combiner_is_the_definition_on_its_projections(causal: bool, length: int) -> None:
    """With rotary positions of the cells, so that scores depend on distances alone."""
    mixer = baselines.Combiner(8, n_heads=2, chunk_size=4, causal=causal).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    def definition(x: Tensor) -> Tensor:
        normed = mixer.norm(x)
        q, k, v = (heads.transpose(0, 1) for heads in mixer.project(normed[0], mixer.describe(x.shape, device=x.device)))
        heads = combiner(mixer, q, k, v[..., :4], normed[0])
        return torch.as_tensor(x + mixer.to_output(heads.transpose(0, 1).flatten(1))[None])

    assert_same_function(mixer, definition, torch.randn(1, length, 8))


def test_summaries_are_rotated_by_the_positions_of_their_cells() -> None:
    """A document that begins with whole chunks of other tokens, which nothing reads, gives the scores of the document alone."""
    mixer = baselines.Combiner(8, n_heads=2, chunk_size=4).double()
    torch.nn.init.normal_(mixer.summary_to_key.weight)
    o, x, query = torch.randn(3, 5, 8, dtype=torch.float64).unbind(0)
    near, far = (mixer.key_summary(o, x, torch.full((5,), position)) for position in (2, 102))
    turned = [mixer.key_summary(query, query, torch.full((5,), position)) for position in (6, 106)]
    scores = [(q * k).sum(-1) for q, k in zip(turned, (near, far), strict=True)]
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.allclose(near, far)


def test_bucket_depends_on_the_direction_of_a_vector_alone() -> None:
    x, directions = torch.randn(1, 2, 50, 6), torch.randn(2, 3, 6, 2)
    buckets = reformer.reformer_buckets(x, directions)
    assert buckets.shape == (1, 2, 3, 50)
    assert set(buckets.flatten().tolist()) == set(range(4))
    assert torch.equal(reformer.reformer_buckets(8 * x, directions), buckets)
    assert torch.equal(reformer.reformer_buckets(-x, directions), (buckets + 2) % 4)


def test_tokens_are_hashed_before_they_are_rotated() -> None:
    layer = baselines.Reformer(16, n_heads=2, n_buckets=8, causal=True)
    _, state = layer.extend(torch.randn(1, 1, 16).expand(1, 30, 16), layer.init_state(1))
    assert torch.equal(state.buckets, state.buckets[..., :1].expand_as(state.buckets))


def test_query_of_zero_has_a_finite_gradient() -> None:
    q = torch.zeros(1, 1, 3, 6, requires_grad=True)
    out = baselines.Reformer(6, n_heads=1, chunk_size=4).attend(q, torch.zeros(1, 1, 3, 6), torch.randn(1, 1, 3, 6), None)
    (gradient,) = torch.autograd.grad(out.square().sum(), q)
    assert gradient.isfinite().all()
