"""Checks of constructor arguments."""

from lineartime.errors import ArgumentError


def check_positive(**sizes: int) -> None:
    """Raise ArgumentError, naming the argument, unless every size is at least 1."""
    for argument, value in sizes.items():
        if not isinstance(value, int):
            raise ArgumentError(argument, f"is {value!r}, but must be a whole number.")
        if value < 1:
            raise ArgumentError(argument, f"is {value}, but must be at least 1.")


def check_fits(layer: str, length: int, max_length: int) -> None:
    """Raise ArgumentError if a sequence is longer than the layer's max_length."""
    if length > max_length:
        raise ArgumentError(
            "max_length",
            f"is {max_length} in this {layer}, but the sequence has {length} tokens: build it with more, or give it shorter "
            "sequences.",
        )


def check_even(reason: str, **sizes: int) -> None:
    """Raise ArgumentError, naming the argument, unless every size is even."""
    for argument, value in sizes.items():
        if value % 2:
            raise ArgumentError(argument, f"is {value}, but must be even: {reason}.")
