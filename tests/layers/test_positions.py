"""Learned parts of positions: relative biases, and what a printed model tells of them."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from tests.definitions import assert_same_with_gradients
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from lineartime.foreign.mixers import BucketBias, ForeignGAU, distance_buckets
from lineartime.layers import FLASH
from lineartime.layers.positions import LearnedPositions, RelativeBias, RotaryBias, TableBias
from lineartime.ops import rope


def test_compiled_code_refuses_more_tokens_than_it_has_learned_positions() -> None:
    positions = torch.compile(LearnedPositions(4, 8), backend="aot_eager", dynamic=True)
    assert positions(torch.arange(4)).shape == (4, 8)
    with pytest.raises(RuntimeError, match="max_positions is 4, the number of learned positions, but the sequence is longer"):
        positions(torch.arange(5))


DEFINITIONS: list[tuple[RelativeBias, Any]] = [
    (TableBias(300), lambda bias, distance: bias.table[distance + 299]),
    (RotaryBias(8), lambda bias, distance: rope(bias.b.expand(len(distance), 8), distance) @ bias.a),
    *((BucketBias(c), lambda bias, distance: bias.values[distance_buckets(distance, bias.causal)]) for c in (False, True)),
]


@pytest.mark.parametrize(("bias", "definition"), DEFINITIONS)
@pytest.mark.parametrize("n", [1, 7, 300])
def test_bias_is_that_of_each_distance(bias: RelativeBias, definition: Any, n: int) -> None:
    bias = bias.double()
    assert_same_with_gradients(bias(n), definition(bias, torch.arange(1 - n, n)), [*bias.parameters()], atol=1e-12)


@pytest.mark.parametrize("layer", [FLASH(8, d_qk=4, chunk_size=16), ForeignGAU(8, d_qk=4, bias_form="buckets")])
def test_compiled_backward_pass_adds_up_in_a_fixed_order(layer: nn.Module) -> None:
    called: list[str] = []

    def collect(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward), bw_compiler=collect)
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(2, 40, 8)).sum().backward()
    assert called
    # On a GPU these add by atomic operations, in another order at each call; as_strided_scatter is a copy of a view.
    adding = [name for name in called if any(part in name for part in ("index_put", "scatter", "index_add"))]
    assert not [name for name in adding if not name.startswith("aten.as_strided_scatter")]
