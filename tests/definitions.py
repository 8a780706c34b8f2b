"""The definition of attention in ops/oracle.py, for rows [B, T, s] and [B, T, e], with the divisors "count"; comparisons."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lineartime.ops import MixedChunkOptions, Scales, oracle
from lineartime.ops.activations import Activation
from lineartime.ops.mixed_chunk import reciprocal


def assert_same_function(fast: Callable[..., Tensor], oracle: Callable[..., Tensor], *inputs: Tensor) -> None:
    """In float64, values and all gradients agree to 1e-10."""
    inputs = tuple(x.double().detach().requires_grad_() for x in inputs)
    assert_same_with_gradients(fast(*inputs), oracle(*inputs), inputs, atol=1e-10)


def assert_same_with_gradients(
    found: Tensor, expected: Tensor, inputs: Sequence[Tensor], *, atol: float, rtol: float = 0.0
) -> None:
    """Two tensors agree, and so do the gradients of the inputs that they were computed from."""
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    if inputs:
        direction = torch.randn_like(expected)
        gradients = (
            torch.autograd.grad((out * direction).sum(), inputs, allow_unused=True, materialize_grads=True)
            for out in (found, expected)
        )
        torch.testing.assert_close(*gradients, atol=atol, rtol=rtol)


class SizesWritten(TorchDispatchMode):
    """Notes how many numbers each operation writes to each of its results, and so what it costs in time and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.sizes += [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


def kept_bytes(run: Callable[[], Any], *, but: Iterable[Tensor] = ()) -> tuple[Any, int]:
    """What is returned, and the bytes of other tensors than `but` that its graph holds for a backward pass."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = run()
    known = {x.untyped_storage().data_ptr() for x in but}
    return result, sum(size for place, size in kept.items() if place not in known)


def noisy(module: nn.Module, size: float = 0.3) -> Any:
    """The module with noise on all its parameters, so that everything in it has a say."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return module


def assert_drawn_alike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], given: Collection[str] = ()) -> None:
    """Constants and tensors that are `given` are equal; others are drawn anew with the same mean and standard deviation."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        other = expected[name]
        if (other == other.flatten()[0]).all() or name in given:
            assert torch.equal(tensor, other), name
            continue
        assert not torch.equal(tensor, other), name
        if tensor.is_floating_point():  # and no seeds
            few = 4 / tensor.numel() ** 0.5
            torch.testing.assert_close(tensor.std(), other.std(), rtol=few, atol=0, msg=name)
            assert tensor.std() > 0.1 * other.std(), name
            assert abs(tensor.mean()) <= few * tensor.std(), name


def quadratic(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Tensor:
    """GAU; the bias is that of all distances, [2 T - 1]."""
    return mixed_chunk(q, k, None, None, v, chunk_size=None, causal=causal, bias=bias)


def mixed_chunk(*maps: Tensor | None, chunk_size: int | None, causal: bool = False, bias: Tensor | None = None) -> Tensor:
    """FLASH, of queries, keys, linear queries, linear keys and values; the bias is that of all distances, [2 C - 1]."""
    *_, v = maps
    assert v is not None
    width = next(x.shape[-1] for x in maps if x is not None)
    scales = Scales(width**-0.5, reciprocal, reciprocal)
    options = MixedChunkOptions(chunk_size, causal, scales, bias=None if bias is None else lambda _: bias)
    rows = ([None if x is None else x[row] for x in maps] for row in range(len(v)))
    return torch.stack([oracle.of_document(*row, options) for row in rows])


def cross_attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, source_mask: Tensor | None = None, activation: Activation = "relu2"
) -> Tensor:
    """The definition of `cross_attention`, one query at a time: slow, a reference for tests."""
    if q.dim() > 3:
        heads = [
            cross_attention_oracle(q[:, h], k[:, h], v[:, h], source_mask=source_mask, activation=activation)
            for h in range(q.shape[1])
        ]
        return torch.stack(heads, 1)
    out = v.new_zeros(*q.shape[:2], v.shape[-1])
    for b in range(q.shape[0]):
        real = [j for j in range(k.shape[1]) if source_mask is None or source_mask[b, j]]
        for t in range(q.shape[1] if real else 0):
            scores = k[b, real] @ q[b, t] / q.shape[-1] ** 0.5
            weights = scores.softmax(0) if activation == "softmax" else scores.relu().square() / len(real)
            out = out.index_put((torch.tensor(b), torch.tensor(t)), weights @ v[b, real])
    return out
