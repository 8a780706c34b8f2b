"""The options of a layer, read from its constructor."""

import inspect
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from lineartime.fields import check_type


class Option(NamedTuple):
    """The type and the default of a keyword argument."""

    type: Any
    default: Any


def constructor_options(layer: type[Any]) -> dict[str, Option]:
    """The keyword arguments of a layer's constructor, by name: those of its bases first, then its own.

    A constructor with `**options: Unpack[SomeOptions]` accepts the arguments that SomeOptions lists. Their types and defaults
    are those of the base class that declares them. A constructor whose `**options` has no such annotation accepts all of them.
    """
    options: dict[str, Option] = {}
    accepted: set[str] | None = None  # None: everything
    for owner in layer.__mro__:
        if "__init__" not in vars(owner):
            continue
        hints = get_type_hints(vars(owner)["__init__"])
        parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        own = {
            parameter.name: Option(hints.get(parameter.name, Any), parameter.default)
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY and (accepted is None or parameter.name in accepted)
        }
        options = {**own, **options}
        passed_on = [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        if not passed_on:
            break
        for listed in get_args(hints.get(passed_on[0])):  # Unpack[SomeOptions]
            accepted = set(listed.__annotations__) if accepted is None else accepted & set(listed.__annotations__)
    return options


_options = cache(constructor_options)


def check_types(layer: Any, values: dict[str, Any]) -> None:
    """Raise ArgumentError, naming the option of a layer, unless each value has the type that the constructor annotates.

    Only types that are classes are checked, such as `int | None`. Others, such as Literal, are left to the constructor, which
    may allow fewer choices than its bases.
    """
    known = _options(layer)
    for name in [name for name in values if name in known]:
        hint = known[name].type
        classes = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(isinstance(part, type) and part is not Any and get_origin(part) is None for part in classes):
            check_type(name, values[name], hint)
