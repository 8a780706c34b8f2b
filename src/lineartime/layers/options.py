"""The options of a layer, read from its constructor."""

import inspect
from typing import Any, NamedTuple, get_args, get_type_hints


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
