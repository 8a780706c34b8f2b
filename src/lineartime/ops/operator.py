"""Functions as PyTorch operators, which torch.compile and torch.export call without tracing into them."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("lineartime", "FRAGMENT")


def register_operator(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    keep_for_backward: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register a function called `_name` as the operator `lineartime::name`; its type hints define the schema.

    `torch.library.custom_op` does the same, but imports the compiler at the first call, which takes seconds.

    Args:
        function: computes on real tensors; it changes none of its arguments and returns none of them.
        fake: returns tensors of the same shapes and dtypes, without computing them.
        keep_for_backward: (ctx, inputs, output), saves what the gradient needs; None for a function without gradient.
        differentiate: (ctx, *gradients of the results) -> gradients of the arguments.

    Returns:
        The operator; call it like the function.
    """
    name = function.__name__.removeprefix("_")
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, _on_one_device(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lineartime::{name}", _on_one_device(fake), lib=_LIBRARY)
    if differentiate is not None:
        unless_undefined = _unless_undefined(differentiate, len(signature(function).parameters))
        torch.library.register_autograd(f"lineartime::{name}", unless_undefined, setup_context=keep_for_backward, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.lineartime, name).default
    return operator


def _unless_undefined(differentiate: Callable[..., Any], n_arguments: int) -> Callable[..., Any]:
    """The gradients of the arguments, which are undefined like those of all results: None stands for zeros."""

    def differentiated(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * n_arguments
        return differentiate(ctx, *gradients)

    return differentiated


def _on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with an error for tensors on several devices: kernels would read the memory of another one.

    One tensor on the meta device would even choose `fake`, whose results are never computed.
    """

    @wraps(function)
    def checked(*arguments: Any) -> Any:
        devices = {x.device for x in arguments if isinstance(x, Tensor)}
        if len(devices) > 1:
            found = " and ".join(sorted(map(str, devices)))
            raise RuntimeError(
                f"The inputs of an attention or loss are on {found}: move the model and its inputs to one device."
            )
        return function(*arguments)

    return checked


def refuse_second_derivative(
    gradient: Tensor, what: str, instead: str = "use backend='torch', or set_backend(model, 'torch')"
) -> None:
    """Raise RuntimeError if the backward pass of this gradient must be differentiable (create_graph=True)."""
    # The compiler records a backward pass with gradients on, and does not differentiate it.
    traced = type(gradient) is not Tensor
    if torch.is_grad_enabled() and not traced and not torch.compiler.is_compiling():
        raise RuntimeError(f"{what} can be differentiated only once: for second derivatives, {instead}.")
