"""Token ids that a caller gives: checked, and converted to integers."""

from collections.abc import Iterable
from operator import index
from typing import Any

from torch import Tensor

from lineartime.errors import ArgumentError

Ids = Iterable[int] | Tensor
"""Token ids: any sequence of integers, a numpy array [N], or a tensor [N]."""


def token_ids(argument: str, given: Any, vocab_size: int) -> tuple[int, ...]:
    """Convert token ids to integers. Raises ArgumentError, naming the argument and the id, for anything else.

    Args:
        argument: the name of the argument.
        given: a sequence of integers, a numpy array [N] or a tensor [N].
        vocab_size: the ids must be below this.
    """
    if isinstance(given, str):
        raise ArgumentError(argument, "is a text, but must be token ids: encode it with the model's tokenizer.")
    if getattr(given, "ndim", 1) != 1:
        raise ArgumentError(argument, f"has shape {list(given.shape)}, but must be the token ids of one text, [N].")
    try:
        values = given.tolist() if hasattr(given, "tolist") else list(given)
    except TypeError:
        raise ArgumentError(argument, f"is {given!r}, but must be a sequence of token ids.") from None
    ids = []
    for value in values:
        try:
            if isinstance(value, bool):
                raise TypeError
            ids.append(index(value))
        except TypeError:
            raise ArgumentError(argument, f"holds {value!r}, but must hold token ids, which are integers.") from None
        if not 0 <= ids[-1] < vocab_size:
            raise ArgumentError(
                argument,
                f"holds the id {value}, but this model's vocabulary has {vocab_size:,} tokens: ids are from 0 to "
                f"{vocab_size - 1}.",
            )
    return tuple(ids)
