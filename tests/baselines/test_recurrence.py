"""The recurrence of linear models against its definition."""

from itertools import product

import pytest
import torch
from torch import Tensor

from lineartime.baselines.recurrence import LONGEST_DECAY, Tokens, recurrence, recurrence_oracle, recurrence_step

KEY, VALUE = 6, 5


def definition(x: Tokens) -> Tensor:
    moves = torch.diag_embed(x.g.exp().expand(-1, KEY))
    if x.a is not None and x.b is not None:
        moves = moves + x.a[:, :, None] * x.b[:, None]
    return recurrence_oracle(x.q, x.k, x.v, moves)


def drawn(length: int, per_feature: bool, delta: bool, fastest: float = 1.0) -> Tokens:
    torch.manual_seed(length)

    def normal(width: int) -> Tensor:
        return torch.randn(length, width, dtype=torch.float64, requires_grad=True)

    decays = -fastest * torch.rand(length, KEY if per_feature else 1, dtype=torch.float64)
    unit = torch.nn.functional.normalize(normal(KEY), dim=-1)
    rule = (-unit * torch.rand(length, 1, dtype=torch.float64), unit) if delta else ()
    return Tokens(normal(KEY), normal(KEY), normal(VALUE), decays.requires_grad_(), *rule)


@pytest.mark.parametrize(("per_feature", "delta"), list(product([False, True], repeat=2)))
def test_every_form_is_the_definition(per_feature: bool, delta: bool) -> None:
    """Values and gradients, at ragged lengths, in chunks of several sizes and one token at a time."""
    for length, size in ((1, 4), (3, 4), (4, 4), (13, 4), (13, 1), (37, 16), (9, 64)):
        x, start = drawn(length, per_feature, delta), torch.zeros(KEY, VALUE, dtype=torch.float64)
        expected, (found, state) = definition(x), recurrence(x, start, chunk_size=size)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
        direction, inputs = torch.randn_like(expected), [x.q, x.k, x.v, x.g]
        gradients = [torch.autograd.grad((out * direction).sum(), inputs, retain_graph=True) for out in (expected, found)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-9)
        with torch.no_grad():
            rows = [recurrence_step(x.map(lambda each, t=t: each[t : t + 1]), start) for t in range(length)]
        torch.testing.assert_close(torch.cat(rows), expected, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(start, state, atol=1e-12, rtol=1e-10)


def test_fastest_decay_that_a_chunk_allows_is_finite_in_float32() -> None:
    x = drawn(40, per_feature=True, delta=True)
    x = x._replace(g=torch.full_like(x.g, -LONGEST_DECAY / 16).detach().requires_grad_())
    single = x.map(lambda each: each.detach().float().requires_grad_())
    out, expected = recurrence(single, torch.zeros(KEY, VALUE), chunk_size=16)[0], definition(x)
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
    k = torch.nn.functional.normalize(torch.randn(length, KEY), dim=-1).bfloat16()
    beta, v = torch.rand(length, 1).bfloat16(), torch.randn(length, VALUE).bfloat16()
    g = -1e-4 * torch.rand(length, KEY if per_feature else 1)
    x = Tokens(k, beta * k, v, g, -g.exp() * (beta * k), k)
    out, state = recurrence(x, torch.zeros(KEY, VALUE), chunk_size=64)
    assert out.isfinite().all()
    assert state.abs().max() < 50
