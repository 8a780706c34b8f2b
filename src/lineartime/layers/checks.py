"""Checks of the inputs of a layer: constructor arguments and tensors."""

import inspect
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lineartime.errors import ArgumentError, did_you_mean
from lineartime.fields import check_type
from lineartime.layers.options import constructor_options
from lineartime.ops.checks import check_positive


def check_options(layer: Any, options: dict[str, Any]) -> None:
    """Raise ArgumentError, naming the argument, if the value of a constructor option does not have the annotated type.

    Only class types are checked. Other types, such as Literal, are left to the constructor, which may allow fewer choices than
    its bases. An unknown option is a TypeError with the class and the options like it; the constructor would name its base. A
    constructor that lists none of the options that it passes on may take any.
    """
    known = _options(layer)
    for name, value in options.items():
        if name in known and _is_of_classes(known[name].type):
            check_type(name, value, known[name].type)
        if name not in known and name not in (accepted := _parameters(layer)) and _ANY not in accepted:
            like = did_you_mean(name, known)
            raise TypeError(f"{layer.__name__}() got an unexpected keyword argument {name!r}{like}")


_options = cache(constructor_options)


_ANY = "**"


@cache
def _parameters(layer: Any) -> set[str]:
    """The names of the parameters of a layer's constructor and those of its bases; `_ANY` if one lists no options."""
    found: set[str] = set()
    for owner in layer.__mro__:
        if "__init__" in vars(owner):
            for parameter in inspect.signature(vars(owner)["__init__"]).parameters.values():
                lists_no_options = parameter.kind is parameter.VAR_KEYWORD and "Unpack" not in str(parameter.annotation)
                named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
                found |= {parameter.name} if named else {_ANY} if lists_no_options else set()
        if owner.__name__ == "ResidualLayer":  # above it, torch.nn.Module takes anything
            break
    return found


def _is_of_classes(hint: Any) -> bool:
    """Whether a type hint is a class or a union of classes, such as `int | None`."""
    classes = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return all(isinstance(part, type) and part is not Any and get_origin(part) is None for part in classes)


def check_tokens(argument: str, x: object, shape: str, width: int, norm: nn.Module, layer: nn.Module) -> None:
    """Raise ArgumentError unless x is a tensor [B, T, width] with the dtype and on the device of a layer.

    Args:
        argument: the name of x.
        x: the value to check.
        shape: the expected shape in the letters of the layer, for messages: "[B, T, d_model]".
        width: d_model.
        norm: the part of the layer that receives x first.
        layer: the layer. Its parameters may have several dtypes; x may have any of them or, under autocast, what it converts.
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(argument, f"is a {type(x).__name__}, but must be a tensor.")
    if x.dim() != 3 or x.shape[-1] != width:
        raise ArgumentError(argument, f"has shape {list(x.shape)}, but must be {shape} with d_model = {width}.")
    if x.layout is not torch.strided:
        raise ArgumentError(argument, f"has the layout {x.layout}, but must be a dense tensor, {torch.strided}.")
    expected = check_device(argument, x, layer if next(norm.parameters(), None) is None else norm).dtype
    if x.dtype == expected:
        return
    if x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return
    if x.dtype not in {parameter.dtype for parameter in layer.parameters() if parameter.is_floating_point()}:
        raise ArgumentError(argument, f"has dtype {x.dtype}, but must have that of the layer, {expected}: convert one of them.")


def check_device(argument: str, x: Tensor, part: nn.Module) -> Tensor:
    """Return a parameter of the module that receives x; raise ArgumentError unless x is on its device."""
    parameter = next(part.parameters())
    # A hook of accelerate moves the inputs and parameters of an offloaded module.
    if x.device != parameter.device and not hasattr(part, "_hf_hook"):
        raise ArgumentError(argument, f"is on {x.device}, but must be on {parameter.device}, like the parameters that read it.")
    return parameter


def check_fits(layer: str, length: int, max_length: int) -> None:
    """Raise ArgumentError if a sequence is longer than the layer's max_length."""
    if length > max_length:
        raise ArgumentError(
            "max_length",
            f"is {max_length} in this {layer}, but the sequence has {length} tokens: increase max_length or pass shorter "
            "sequences.",
        )


def check_even(reason: str, **sizes: int) -> None:
    """Raise ArgumentError, naming the argument, unless every size is even."""
    for argument, value in sizes.items():
        if value % 2:
            raise ArgumentError(argument, f"is {value}, but must be even: {reason}.")


def check_heads(n_heads: int, widths: dict[str, int], in_pairs: bool) -> None:
    """Raise ArgumentError unless `n_heads` is at least 1 and divides every width, which messages call by its name.

    With `in_pairs`, the width of a head must also be even, because rotary positions rotate pairs of features.
    """
    check_positive(n_heads=n_heads)
    for name, width in widths.items():
        if width % n_heads:
            raise ArgumentError("n_heads", f"is {n_heads}, but must divide {name} = {width}.")
        if in_pairs and width // n_heads % 2:
            raise ArgumentError(
                "n_heads",
                f"is {n_heads}, but {name} / n_heads = {width // n_heads} must be even: pairs of features are rotated.",
            )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks or a replaced `forward`, or hooks are registered for all modules."""
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return bool(forward or module._backward_hooks or module._backward_pre_hooks or torch_module._has_any_global_hook())
