"""The recurrence of linear models against its definition, and today's linear models against those of their papers."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.definitions import noisy
from torch import Tensor

from lineartime.baselines import GLA, RWKV7, DeltaNet, GatedDeltaNet, LaCT, Mamba2, RetNet
from lineartime.baselines.lact import net, orthogonalised
from lineartime.baselines.recurrence import LONGEST_DECAY, Tokens, recurrence, recurrence_step
from lineartime.models import build
from lineartime.ops.positions import rotary_table, rotate

KEY, VALUE = 6, 5


def drawn(length: int, per_feature: bool, delta: bool, fastest: float = 1.0) -> Tokens:
    torch.manual_seed(length)

    def normal(width: int) -> Tensor:
        return torch.randn(length, width, dtype=torch.float64, requires_grad=True)

    decays = -fastest * torch.rand(length, KEY if per_feature else 1, dtype=torch.float64)
    unit = F.normalize(normal(KEY), dim=-1)
    rule = (-unit * torch.rand(length, 1, dtype=torch.float64), unit) if delta else ()
    return Tokens(normal(KEY), normal(KEY), normal(VALUE), decays.requires_grad_(), *rule)


def by_token(q: Tensor, k: Tensor, v: Tensor, moved: Tensor) -> Tensor:
    """S[t] = A[t] S[t - 1] + k[t] v[t]^T and o[t] = S[t]^T q[t] of one head; `moved`, [T, s, s], holds the matrices A."""
    s, rows = v.new_zeros(k.shape[1], v.shape[1]), []
    for t in range(len(v)):
        s = moved[t] @ s + torch.outer(k[t], v[t])
        rows.append(s.mT @ q[t])
    return torch.stack(rows)


def defined(x: Tokens) -> Tensor:
    moved = x.g.exp().expand_as(x.k).diag_embed()
    return by_token(x.q, x.k, x.v, moved if x.a is None or x.b is None else moved + x.a[..., None] * x.b[:, None])


@pytest.mark.parametrize(("per_feature", "delta"), list(product([False, True], repeat=2)))
def test_every_form_is_the_definition(per_feature: bool, delta: bool) -> None:
    """Values and gradients, at ragged lengths, in chunks of several sizes and one token at a time."""
    for length, size in ((1, 4), (3, 4), (4, 4), (13, 4), (13, 1), (37, 16), (9, 64)):
        x, start = drawn(length, per_feature, delta), torch.zeros(KEY, VALUE, dtype=torch.float64)
        expected, (found, state) = defined(x), recurrence(x, start, chunk_size=size)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
        direction, inputs = torch.randn_like(expected), [x.q, x.k, x.v, x.g]
        gradients = [torch.autograd.grad((out * direction).sum(), inputs, retain_graph=True) for out in (expected, found)]
        torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-9)
        with torch.no_grad():
            rows = [recurrence_step(x.map(lambda each, t=t: each[t : t + 1]), start) for t in range(length)]
        torch.testing.assert_close(torch.cat(rows), expected, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(start, state, atol=1e-12, rtol=1e-10)


def test_fastest_decay_that_a_chunk_allows_is_finite_in_float32() -> None:
    x = drawn(40, per_feature=True, delta=True)
    x = x._replace(g=torch.full_like(x.g, -LONGEST_DECAY / 16).detach().requires_grad_())
    single = x.map(lambda each: each.detach().float().requires_grad_())
    out, expected = recurrence(single, torch.zeros(KEY, VALUE), chunk_size=16)[0], defined(x)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    for name, scale in product("qkvg", (1.0, 1e-8)):  # of a mean over many tokens, gradients are small
        found, wanted = (
            torch.autograd.grad(each.sum() * scale, getattr(of, name), retain_graph=True)[0].double() / scale
            for each, of in ((out, single), (expected, x))
        )
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("per_feature", "delta"), list(product([False, True], repeat=2)))
def test_later_tokens_of_a_chunk_do_not_change_the_rounding_of_earlier_ones(per_feature: bool, delta: bool) -> None:
    first = drawn(40, per_feature, delta).map(lambda each: each.detach().float())
    later = first.map(lambda each: torch.cat([each[:19], 3 * each[19:]]))
    out, other = (recurrence(x, torch.zeros(KEY, VALUE), chunk_size=16)[0] for x in (first, later))
    assert torch.equal(out[:19], other[:19])
    assert not torch.equal(out[19:], other[19:])


@pytest.mark.parametrize("per_feature", [False, True])
def test_delta_rule_stays_bounded_over_65536_tokens(per_feature: bool) -> None:
    """diag(decay) (I - beta k k^T) has no singular value above 1, so the state does not grow, also with keys in bfloat16."""
    torch.manual_seed(0)
    length = 65_536
    k = F.normalize(torch.randn(length, KEY), dim=-1).bfloat16()
    beta, v = torch.rand(length, 1).bfloat16(), torch.randn(length, VALUE).bfloat16()
    g = -1e-4 * torch.rand(length, KEY if per_feature else 1)
    x = Tokens(k, beta * k, v, g, -g.exp() * (beta * k), k)
    out, state = recurrence(x, torch.zeros(KEY, VALUE), chunk_size=64)
    assert out.isfinite().all()
    assert state.abs().max() < 50


D_MODEL, HEADS, LENGTH = 16, 2, 70  # more than a chunk of 64

# What a head computes, given its layer, its number, the maps of the layer by heads, and the normed tokens.
Definition = Callable[[Any, int, Sequence[Tensor], Tensor], Tensor]


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def retnet(_: Any, head: int, maps: Sequence[Tensor], __: Tensor) -> Tensor:
    q, k, v = maps
    turned = rotary_table(torch.arange(len(v)), q.shape[1] // 2, q.dtype)
    gamma = (1 - 2.0 ** (-5 - head)) * torch.eye(q.shape[1]).double()
    return by_token(rotate(q, turned) / q.shape[1] ** 0.5, rotate(k, turned), v, gamma.expand(len(v), -1, -1))


def gla(layer: GLA, head: int, maps: Sequence[Tensor], normed: Tensor) -> Tensor:
    q, k, v = maps
    alpha = layer.heads(layer.to_decay(layer.to_rank(normed)).sigmoid() ** (1 / 16))[:, head]
    return by_token(q / q.shape[1] ** 0.5, k, v, alpha.diag_embed())


def deltanet(layer: DeltaNet, head: int, maps: Sequence[Tensor], normed: Tensor) -> Tensor:
    q, k, v = unit(maps[0]), unit(maps[1]), maps[2]
    alpha = torch.ones(len(v), dtype=v.dtype)
    if layer.decay is not None:
        step = F.softplus(normed @ layer.decay.weight.mT + layer.decay.bias)[:, head]
        alpha = (-layer.decay.log_a[head].exp() * step).exp()
    stored = layer.to_beta(normed).sigmoid()[:, head, None] * k
    moved = alpha[:, None, None] * (torch.eye(k.shape[1]) - stored[..., None] * k[:, None])
    return by_token(q / q.shape[1] ** 0.5, stored, v, moved)


def mamba2(layer: Mamba2, head: int, maps: Sequence[Tensor], normed: Tensor) -> Tensor:
    c, b, x = maps
    step = F.softplus(normed @ layer.decay.weight.mT + layer.decay.bias)[:, head, None]
    return by_token(c, step * b, x, (-layer.decay.log_a[head].exp() * step).exp().expand_as(b).diag_embed())


def rwkv7(layer: RWKV7, head: int, maps: Sequence[Tensor], _: Tensor) -> Tensor:
    r, w, k, v, a, _ = maps
    removal, replacement = (part.view(HEADS, -1)[head] for part in (layer.removal, layer.replacement))
    c, w = unit(k * removal), (-torch.tensor(-0.5).double().exp() * w.sigmoid()).exp()
    k = k * (1 + (a - 1) * replacement)
    return by_token(r, k, v, w.diag_embed() - (a * c)[..., None] * c[:, None])


ROWS: list[tuple[Any, dict[str, Any], Definition]] = [
    (RetNet, {}, retnet),
    (RetNet, {"short_convolution": True}, retnet),
    (GLA, {}, gla),
    (DeltaNet, {}, deltanet),
    (GatedDeltaNet, {"short_convolution": False}, deltanet),
    (Mamba2, {"d_state": 6}, mamba2),
    (RWKV7, {}, rwkv7),
]


@pytest.mark.parametrize(("mixer", "options", "definition"), ROWS)
@torch.no_grad()
def test_head_computes_what_its_paper_defines(mixer: Any, options: dict[str, Any], definition: Definition) -> None:
    torch.manual_seed(0)
    layer: Any = noisy(mixer(D_MODEL, n_heads=HEADS, **options).double())
    x = torch.randn(1, LENGTH, D_MODEL, dtype=torch.float64)
    packing, normed = layer.describe(x.shape, device=x.device), layer.before(x)[0]
    own = layer.remember(normed)
    maps = layer.project([own, *packing.earlier(own, layer.recent_shape[0])[0]])
    rows, _ = layer.recur(layer.tokens(normed, maps, packing).map(lambda each: each[None]), None)
    found = rows[0]
    for head in range(HEADS):
        # the heads of Mamba-2 share their queries and keys
        of_head = [each if each.shape[-1] == options.get("d_state") else layer.heads(each)[:, head] for each in maps]
        torch.testing.assert_close(found[:, head], definition(layer, head, of_head, normed), atol=1e-9, rtol=1e-9)
    # and what follows is the norm of a head, the gate and the projection
    if mixer in (RetNet, GLA, DeltaNet, GatedDeltaNet):
        scale = (found.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        out = (found * scale * layer.head_norm.weight).flatten(1)
        out = out if layer.to_gate is None else out * F.silu(layer.to_gate(normed))
        torch.testing.assert_close(layer(x)[0], x[0] + layer.to_output(out), atol=1e-9, rtol=1e-9)


def test_rwkv7_starts_by_depth_as_its_authors() -> None:
    n = D_MODEL
    layers: list[tuple[int, int, Any]] = [(0, 1, RWKV7(n, n_heads=2))]
    for mixers in (["rwkv7"], ["rwkv7", "retnet", "rwkv7"]):
        model = build("rwkv7-tiny", pattern=mixers, d_model=n, n_heads=2, n_blocks=3)
        layers += [(i, 3, block.mixer) for i, block in enumerate(model.backbone.blocks) if isinstance(block.mixer, RWKV7)]
    for block, n_blocks, layer in layers:
        layer.reset_parameters()
        place, zigzag = torch.arange(n) / (n - 1), torch.linspace(-1, 1, n // 2).repeat(2)
        zigzag = zigzag * zigzag.abs()
        past = [(torch.arange(n) / n) ** (power * (1 - block / n_blocks)) for power in (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)]
        for found, expected in (
            (layer.mixture, 1 - torch.stack(past)),
            (layer.decay, -6 + 6 * place ** (1 + (block / max(n_blocks - 1, 1)) ** 0.3) + 0.5 + 2.5 * zigzag),
            (layer.rate, -0.19 + 0.3 * zigzag + 0.4 * (place - 0.5)),
            (layer.removal, 0.71 - 0.1 * (place - 0.5)),
        ):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_networks_of_lact_descend_as_autograd_says() -> None:
    torch.manual_seed(0)
    size, width = 4, D_MODEL // HEADS
    layer = noisy(LaCT(D_MODEL, chunk_size=size, n_nets=HEADS, n_heads=2).double())
    for length in (1, 4, 15):
        _, fast, _ = layer.split_maps(torch.randn(length, D_MODEL, dtype=torch.float64))
        found, _ = layer.read_fast(fast.transpose(0, 1)[None], 0, None)
        for head in range(HEADS):
            q, k, v, rates, m = fast[:, head].split([width, width, width, 3, 1], -1)
            weights, change, expected = layer.weights[head], torch.zeros_like(layer.weights[head]), []
            lengths = weights.norm(dim=-1, keepdim=True)
            for start in range(0, length, size):
                chunk = range(start, min(start + size, length))
                expected += [net(weights, q[t, None])[0] for t in chunk]
                change = m[chunk].mean() * change
                for t in chunk:
                    with torch.enable_grad():
                        before = weights.detach().requires_grad_()
                        (gradient,) = torch.autograd.grad(-(net(before, k[t, None])[0] @ v[t]), before)
                    change = change - rates[t][:, None, None] * gradient
                weights = weights + orthogonalised(change)
                weights = weights / (weights.norm(dim=-1, keepdim=True) + 1e-5) * lengths
            torch.testing.assert_close(found[0, head], torch.stack(expected), atol=1e-10, rtol=1e-9)
