"""Modules that have shapes and no values, from which sizes and limits are read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class _WithoutInitialValues(TorchFunctionMode):
    """Leave tensors as they are that torch.nn.init would fill, where PyTorch asks: with random numbers or a constant."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return options["tensor"] if "tensor" in options else args[0]
        return func(*args, **options)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Make tensors on the meta device: they have a shape and a dtype, but no memory.

    With `torch.device("meta")` alone, PyTorch imports its compiler to draw the first initial value, which takes seconds.
    """
    with torch.device("meta"), _WithoutInitialValues():
        yield
