"""The formulas with which PyTorch's FlopCounterMode counts the operators of lineartime, by their matrix products.

A multiplication and an addition count as two operations, as everywhere in PyTorch. Products that a backward pass recomputes
count again. A causal quadratic form counts the blocks of queries and keys that `tiled.py` computes, without keys that come
after all queries of a block. Sums over chunks count the chunks that are summed and the chunks that use the sums.

The formulas are registered when torch.utils.flop_counter is imported, before or after lineartime. lineartime does not import it
itself, because the import takes a while and few programs need it.

Shapes: B batch, G chunks, C chunk size, R rows, L slots of a row, s query/key width, e value width, N tokens, V vocabulary.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from lineartime.ops.quadratic.tiled import QUERIES

COUNTER = "torch.utils.flop_counter"

# 1. The formulas: from the arguments of an operator, shapes in place of tensors, to a count ---------------------------


def _chunk_products(batch: int, n_chunks: int, chunk_size: int, of_pairs: int, n_sums: int, matrix: int) -> int:
    """Products of `of_pairs` features for all pairs of tokens in a chunk, and `n_sums` products with an s x e matrix."""
    return 2 * batch * chunk_size * (n_chunks * chunk_size * of_pairs + n_sums * matrix)


def _tiled_mixed_chunk(arguments: dict[str, Any], times: int = 1) -> int:
    (batch, n_chunks, chunk_size, width), (_, d_qk) = arguments["projected"], arguments["gamma"]
    d_value = (width - d_qk) // 2
    n_summed = max(0, n_chunks - 1) if arguments["causal"] else n_chunks  # the first chunk reads nothing, the last is not read
    of_pairs = d_qk + d_value if times == 1 else 3 * d_qk + 2 * d_value
    of_output = 0 if arguments["output"] is None else 2 * times * batch * n_chunks * chunk_size * math.prod(arguments["output"])
    return of_output + _chunk_products(batch, n_chunks, chunk_size, of_pairs, 2 * times * n_summed, d_qk * d_value)


def _triton_mixed_chunk(arguments: dict[str, Any], of_pairs: tuple[int, int] = (1, 1), n_sums: int = 2) -> int:
    """`of_pairs` products of the widths s and e for all pairs of tokens of a chunk."""
    (batch, n_chunks, chunk_size, d_qk), d_value = arguments["q_quad"], arguments["v"][-1]
    pairs = of_pairs[0] * d_qk + of_pairs[1] * d_value
    return _chunk_products(batch, n_chunks, chunk_size, pairs, n_sums * n_chunks, d_qk * d_value)


def _gated_mixed_chunk(arguments: dict[str, Any], of_pairs: tuple[int, int] = (1, 1), n_sums: int = 2) -> int:
    """As `_triton_mixed_chunk`."""
    (batch, n_chunks, chunk_size, width), (_, d_qk) = arguments["tokens"], arguments["gamma"]
    d_value = (width - d_qk) // 2
    pairs = of_pairs[0] * d_qk + of_pairs[1] * d_value
    return _chunk_products(batch, n_chunks, chunk_size, pairs, n_sums * n_chunks, d_qk * d_value)


def _exported_mixed_chunk(arguments: dict[str, Any]) -> int:
    (batch, length, width), (_, d_qk), chunk_size = arguments["projected"], arguments["gamma"], arguments["chunk_size"]
    n_chunks, d_value = -(-length // int(chunk_size)), (width - d_qk) // 2
    return _chunk_products(batch, n_chunks, chunk_size, d_qk + d_value, 2 * n_chunks, d_qk * d_value)


def _quadratic(arguments: dict[str, Any], of_keys: int = 1, of_values: int = 1) -> int:
    """`of_keys` and `of_values` products of the widths s and e for all pairs of a query and a key."""
    (rows, length, d_qk), d_value = arguments["q"], arguments["v"][-1]
    stops = [(start, min(start + QUERIES, length)) for start in range(0, length, QUERIES)]
    pairs = sum((stop - start) * (stop if arguments["causal"] else length) for start, stop in stops)
    flops: int = 2 * rows * pairs * (of_keys * d_qk + of_values * d_value)
    return flops


def _triton_quadratic_backward(arguments: dict[str, Any]) -> int:
    with_bias = int(arguments["bias"] is not None and arguments["with_d_bias"])
    return _quadratic(arguments, of_keys=5 + with_bias, of_values=3 + with_bias)


def _linear_cross_entropy(arguments: dict[str, Any]) -> int:
    (tokens, width), (vocabulary, _) = arguments["hidden"], arguments["weight"]
    flops: int = 2 * tokens * width * vocabulary * (3 if arguments["keep"] else 1)  # kept gradients are computed with the loss
    return flops


FORMULAS: dict[str, Callable[[dict[str, Any]], int]] = {
    "tiled_mixed_chunk": _tiled_mixed_chunk,
    "tiled_mixed_chunk_backward": partial(_tiled_mixed_chunk, times=2),
    "tiled_quadratic": _quadratic,
    "tiled_quadratic_backward": partial(_quadratic, of_keys=3, of_values=2),
    "exported_mixed_chunk": _exported_mixed_chunk,
    "exported_quadratic": _quadratic,
    "linear_cross_entropy": _linear_cross_entropy,
    "triton_mixed_chunk": _triton_mixed_chunk,
    "triton_mixed_chunk_backward": partial(_triton_mixed_chunk, of_pairs=(3, 2), n_sums=4),
    "triton_gated_mixed_chunk": _gated_mixed_chunk,
    "triton_gated_mixed_chunk_extend": _gated_mixed_chunk,
    "triton_gated_mixed_chunk_backward": partial(_gated_mixed_chunk, of_pairs=(3, 2), n_sums=4),
    "triton_quadratic": _quadratic,
    "triton_quadratic_backward": _triton_quadratic_backward,
}
"""The formulas by the name of the operator in torch.ops.lineartime."""


# 2. How they reach the counter ----------------------------------------------------------------------------------------


def _register(counter: ModuleType) -> None:
    """Register all formulas with torch.utils.flop_counter."""
    modules = ["lineartime.ops.cross_entropy", "lineartime.ops.exported", "lineartime.ops.mixed_chunk"]
    if importlib.util.find_spec("triton") is not None and torch.cuda.is_available():  # the kernels may run
        modules += ["lineartime.ops.triton.gated", "lineartime.ops.triton.quadratic"]
    for module in modules:
        importlib.import_module(module)  # defines its operators
    for name, formula in FORMULAS.items():
        operator = getattr(torch.ops.lineartime, name, None)
        if operator is not None and operator not in counter.flop_registry:  # without Triton, its operators do not exist
            counter.register_flop_formula(operator)(_by_name(operator, formula))


def _by_name(operator: Any, formula: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    names = [argument.name for argument in operator.default._schema.arguments]

    def count(*arguments: Any, out_shape: Any = None, **keywords: Any) -> int:
        return formula({**dict(zip(names, arguments, strict=False)), **keywords})

    return count


class _WhenImported(importlib.abc.MetaPathFinder):
    """An import hook that registers the formulas when the counter is imported, and then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != COUNTER:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # to register when it is imported
        return spec


def register_formulas() -> None:
    """Register the formulas of all operators: now if the counter has been imported, otherwise when it is."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())
