"""Functions as PyTorch operators, which torch.compile and torch.export call without tracing into them.

`register_operator` registers any function. `Fused` frames a form that computes its result and its gradients by code of its own:
from two functions of a NamedTuple of inputs it makes two operators, and tells PyTorch what it must know of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from lineartime.ops.modes import without_autocast

_LIBRARY = torch.library.Library("lineartime", "FRAGMENT")
_TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "SymInt", float: "float", bool: "bool", str: "str",
    torch.dtype: "ScalarType", list[bool]: "bool[]",
}  # fmt: skip
Inputs = TypeVar("Inputs", bound=NamedTuple)
Tensors = tuple[Tensor, ...]


def register_operator(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    name: str = "",
    types: dict[str, Any] | None = None,
    n_results: int = 1,
    keep_for_backward: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
    once: tuple[str, str] | None = None,
) -> Callable[..., Any]:
    """Register a function of tensors, which neither changes nor returns its arguments, as the operator `lineartime::name`.

    `fake` returns tensors of the same shapes and dtypes without computing them. `keep_for_backward(ctx, inputs, output)` saves
    what `differentiate(ctx, *gradients)` needs; if that has no gradient itself, `once` says whose, and what else to use. The
    name and the types of the arguments are those of the function, unless given; it returns `n_results` tensors.

    `torch.library.custom_op` does the same, but imports the compiler at the first call, which takes seconds.
    """
    name = name or function.__name__.removeprefix("_")
    types = types or {key: hint for key, hint in get_type_hints(function).items() if key != "return"}
    arguments = ", ".join(f"{_TYPES[hint]} {key}" for key, hint in types.items())
    _LIBRARY.define(f"{name}({arguments}) -> ({', '.join(['Tensor'] * n_results)})")
    _LIBRARY.impl(name, partial(_on_one_device, function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lineartime::{name}", partial(_on_one_device, fake), lib=_LIBRARY)

    def gradients_of(ctx: Any, *gradients: Tensor | None) -> Any:
        given = [gradient for gradient in gradients if gradient is not None]
        if differentiate is None or not given:
            return (None,) * len(types)
        # The compiler records a backward pass with gradients on, and does not differentiate it.
        traced = type(given[0]) is not Tensor or torch.compiler.is_compiling()
        if once is not None and torch.is_grad_enabled() and not traced:
            raise RuntimeError(f"{once[0]} can be differentiated only once: for second derivatives, {once[1]}.")
        return differentiate(ctx, *gradients)

    if differentiate is not None:
        torch.library.register_autograd(f"lineartime::{name}", gradients_of, setup_context=keep_for_backward, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.lineartime, name).default
    return operator


def _on_one_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; RuntimeError for tensors on several devices: kernels would read the memory of another one.

    One tensor on the meta device would even choose `fake`, whose results are never computed.
    """
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"The inputs of an attention or loss are on {found}: move the model and its inputs to one device.")
    return function(*arguments)


class Fused(Generic[Inputs]):
    """A form that computes its own gradients, as the operators `name` and `name_backward`. Call it with its inputs.

    Args:
        name: the name of the operator.
        inputs: the type of its inputs, a NamedTuple with the tensors first.
        forward: (inputs, keep) -> the result and, if `keep`, tensors that the backward pass needs. It runs without autocast.
        fake: the same, but only the shapes and dtypes of these tensors matter.
        backward: (inputs, kept, gradient of the result, wanted) -> the gradients of the inputs `wrt`, in any dtype; what it
            returns where one is not wanted is dropped. It runs without autocast.
        wrt: the inputs that have gradients.
        n_kept: the number of tensors that are kept.
        what: the name of the form, in the error of a second derivative.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Inputs],
        forward: Callable[[Inputs, bool], Tensors],
        fake: Callable[[Inputs, bool], Tensors],
        backward: Callable[[Inputs, Tensors, Tensor, list[bool]], Sequence[Tensor | None]],
        *,
        wrt: tuple[str, ...],
        n_kept: int = 0,
        what: str,
    ) -> None:
        types = get_type_hints(inputs)
        self._make, self._n_kept = inputs._make, n_kept
        self._n_tensors = sum(hint in (Tensor, Tensor | None) for hint in types.values())
        self._places = [inputs._fields.index(field) for field in wrt]
        self.operator = register_operator(
            partial(self._forward, forward), partial(self._forward, fake), name=name, types={**types, "keep": bool},
            n_results=1 + n_kept, keep_for_backward=self._keep, differentiate=self._differentiate,
            once=(what, "use backend='torch', or set_backend(model, 'torch')"),
        )  # fmt: skip
        kept = {f"kept_{i}": Tensor for i in range(n_kept)}
        fake_backward = partial(
            self._backward, lambda inputs, *_: [None if x is None else x.new_empty(x.shape) for x in self._given(inputs)]
        )
        self.backward = register_operator(
            partial(self._backward, backward), fake_backward, name=f"{name}_backward", n_results=len(wrt),
            types={"d_out": Tensor, **kept, **types, "wanted": list[bool]},
        )  # fmt: skip

    def __call__(self, inputs: Inputs) -> Tensor:
        """The result, of which autograd knows the gradients."""
        keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self._given(inputs))
        out = self.operator(*inputs, keep)
        result: Tensor = out[0] if self._n_kept else out
        return result

    def _given(self, inputs: Inputs) -> list[Any]:
        """The inputs that have gradients."""
        return [inputs[place] for place in self._places]

    def _forward(self, function: Callable[[Inputs, bool], Tensors], *arguments: Any) -> Any:
        """The results of `forward` or `fake`, with empty tensors in place of what is not kept."""
        *inputs, keep = arguments
        with without_autocast(inputs[0]):
            out, *kept = function(self._make(inputs), keep)
        if not keep:
            kept = [out.new_empty(0) for _ in range(self._n_kept)]
        return (out, *kept) if self._n_kept else out

    def _backward(self, function: Callable[..., Any], d_out: Tensor, *arguments: Any) -> Tensors:
        """The results of `backward` or its fake: gradients like the inputs, empty where none is wanted."""
        kept, rest, wanted = arguments[: self._n_kept], arguments[self._n_kept : -1], arguments[-1]
        inputs = self._make(rest)
        with without_autocast(d_out):
            gradients = function(inputs, kept, d_out, wanted)
        return tuple(
            gradient.to(x.dtype) if need else d_out.new_empty(0)
            for gradient, x, need in zip(gradients, self._given(inputs), wanted, strict=True)
        )

    def _keep(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept = output[1:] if self._n_kept else ()
        ctx.save_for_backward(*kept, *inputs[: self._n_tensors])
        ctx.rest = inputs[self._n_tensors : -1]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)  # no zeros are needed for what is kept

    def _differentiate(self, ctx: Any, d_out: Tensor, *_not_differentiable: None) -> tuple[Tensor | None, ...]:
        wanted = [ctx.needs_input_grad[place] for place in self._places]
        found = self.backward(d_out, *ctx.saved_tensors, *ctx.rest, wanted)
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, need, gradient in zip(self._places, wanted, found, strict=True):
            gradients[place] = gradient if need else None
        return tuple(gradients)
