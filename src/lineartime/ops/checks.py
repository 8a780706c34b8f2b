"""Checks of the arguments of attentions, which name the argument, its value and what is allowed."""

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.operator import under_transform


def check_queries_keys_values(queries_and_keys: dict[str, Tensor], v: Tensor) -> None:
    """Raise ValueError unless every named query or key is [B, T, s], with one s, for values [B, T, e]."""
    if v.dim() != 3:
        raise ValueError(f"v has shape {list(v.shape)}, but must be [B, T, e].")
    d_qk = next(iter(queries_and_keys.values())).shape[-1]
    expected = [*v.shape[:2], d_qk]
    for name, tensor in queries_and_keys.items():
        if list(tensor.shape) != expected:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but must be [B, T, s] = {expected}, v being {list(v.shape)}."
            )


def check_bias(bias: Tensor | None, size: int, letter: str) -> None:
    """Raise ValueError unless `bias` is None or [size, size]."""
    if bias is not None and bias.shape != (size, size):
        raise ValueError(f"bias has shape {list(bias.shape)}, but must be [{letter}, {letter}] = [{size}, {size}].")


def is_readable(x: Tensor) -> bool:
    """Whether a check may look at the values of x: on a CPU, where nothing waits for a device, and not while it is traced."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling() and not under_transform()


def is_whole(x: Tensor) -> bool:
    """Whether it holds whole numbers, of which True and False are none."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def require(condition: Tensor, argument: str, predicate: str) -> None:
    """Raise ArgumentError unless the condition, bool, holds everywhere.

    On a GPU, and in compiled code, the device itself stops with this message: looking at values here would make the host wait.
    Under a transform of torch.func, where nobody may look at values, it checks nothing.
    """
    if condition.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(condition.all(), f"{argument} {predicate}")
    elif condition.device.type != "meta" and not under_transform() and not condition.all():
        raise ArgumentError(argument, predicate)


def shortened(numbers: list[int]) -> str:
    """Numbers for a message, the middle of many being left out."""
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}]"
