"""Learned parts of positions: relative biases, and what a printed model tells of them."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from lineartime.foreign.mixers import BucketBias, ForeignGAU
from lineartime.layers import FLASH
from lineartime.layers.positions import LearnedPositions, RelativeBias, RotaryBias, TableBias


def test_compiled_code_refuses_more_tokens_than_it_has_learned_positions() -> None:
    positions = torch.compile(LearnedPositions(4, 8), backend="aot_eager", dynamic=True)
    assert positions(torch.arange(4)).shape == (4, 8)
    with pytest.raises(RuntimeError, match="max_positions is 4, the number of learned positions, but the sequence is longer"):
        positions(torch.arange(5))


@pytest.mark.parametrize("bias", [TableBias(300), RotaryBias(8), BucketBias(causal=True), BucketBias(causal=False)])
def test_bias_of_tokens_side_by_side_is_that_of_their_positions(bias: RelativeBias) -> None:
    for sizes in ((1, 1, 0), (7, 7, 0), (3, 9, 6), (4, 12, 4), (1, 300, 299), (300, 300, 0)):
        check_tokens_side_by_side(bias.double(), *sizes)


def check_tokens_side_by_side(bias: RelativeBias, n_queries: int, n_keys: int, first: int) -> None:
    queries, keys = torch.arange(first, first + n_queries), torch.arange(n_keys)
    weights = torch.randn(n_queries, n_keys, dtype=torch.float64)
    parameters = list(bias.parameters())
    results = []
    for out in (bias.consecutive(n_queries, n_keys, first), bias(queries, keys)):
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), parameters)))
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


@pytest.mark.parametrize("layer", [FLASH(8, d_qk=4, chunk_size=16), ForeignGAU(8, d_qk=4, bias_form="buckets")])
def test_compiled_backward_pass_adds_up_in_a_fixed_order(layer: nn.Module) -> None:
    called: list[str] = []

    def collect(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward), bw_compiler=collect)
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(2, 40, 8)).sum().backward()
    assert called
    # On a GPU these add by atomic operations, in another order at each call.
    assert not [name for name in called if any(part in name for part in ("index_put", "scatter", "index_add"))]
