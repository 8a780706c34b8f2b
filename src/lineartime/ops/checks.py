"""Checks of the arguments of layers and attentions. Their errors name the argument, its value and what is allowed."""

from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.modes import is_traced, under_transform


def check_positive(**sizes: int) -> None:
    """Raise ArgumentError, naming the argument, unless every size is an integer of at least 1."""
    for argument, value in sizes.items():
        if not isinstance(value, Integral) or isinstance(value, bool):  # those of numpy are fine
            raise ArgumentError(argument, f"is {value!r}, but must be an integer.")
        if value < 1:
            raise ArgumentError(argument, f"is {value}, but must be at least 1.")


def check_even(reason: str, **sizes: int) -> None:
    """Raise ArgumentError, naming the argument, unless every size is even."""
    for argument, value in sizes.items():
        if value % 2:
            raise ArgumentError(argument, f"is {value}, but must be even: {reason}.")


def check_n_heads(n_heads: int, widths: dict[str, int], in_pairs: bool) -> None:
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


def check_fits(layer: str, length: int, max_length: int) -> None:
    """Raise ArgumentError if a sequence is longer than the layer's max_length."""
    if length > max_length:
        raise ArgumentError(
            "max_length",
            f"is {max_length} in this {layer}, but the sequence has {length} tokens: increase max_length or pass shorter "
            "sequences.",
        )


def check_continues(**pairs: tuple[Tensor, Tensor]) -> None:
    """Raise ArgumentError unless new tensors [..., N, f] fit tensors of a state, [..., T, f]; each pair has its name.

    All sizes but N and T must be equal. Traced code is not checked: comparing sizes would fix them there.
    """
    if is_traced():
        return
    for name, (new, old) in pairs.items():
        *streams, _, width = old.shape
        if new.dim() != old.dim() or list(new.shape[:-2]) != streams or new.shape[-1] != width:
            needed = ", ".join(map(str, [*streams, "N", width]))
            raise ArgumentError(
                "state",
                f"needs {name} of shape [{needed}], but it is {list(new.shape)}: give tokens and state of the same streams.",
            )


def is_readable(x: Tensor) -> bool:
    """Whether a check may read the values of x: on a CPU, where this needs no device sync, and not while x is traced."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling() and not under_transform()


def check_whole(argument: str, x: object) -> None:
    """Raise ArgumentError unless x is a tensor of int64 or int32."""
    if not isinstance(x, Tensor):
        raise ArgumentError(argument, f"is a {type(x).__name__}, but must be a tensor.")
    if x.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(argument, f"has dtype {x.dtype}, but must be torch.int64 or torch.int32.")


def require(condition: Tensor, argument: str, predicate: str) -> None:
    """Raise ArgumentError unless the condition, bool, holds everywhere.

    On a GPU and in compiled code, an assertion on the device fails with this message, because reading values on the host would
    force a device sync. Under a transform of torch.func, where values cannot be read, nothing is checked.
    """
    if condition.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(condition.all(), f"{argument} {predicate}")
    elif condition.device.type != "meta" and not under_transform() and not condition.all():
        raise ArgumentError(argument, predicate)


def shortened(numbers: list[int]) -> str:
    """Format numbers for a message, leaving out the middle of a long list."""
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:6]))}, ..., {numbers[-1]}]"


def check_documents(shape: tuple[int, ...], cu_seqlens: Tensor | None) -> list[int] | None:
    """The number of tokens, padding included, of each document of [B, T, ...]; None for packed documents in compiled code.

    Raises:
        ArgumentError: if `cu_seqlens` does not match the tokens.
    """
    batch, length = shape[:2]
    if cu_seqlens is None:
        return [length]
    check_whole("cu_seqlens", cu_seqlens)
    if batch != 1:
        raise ArgumentError("cu_seqlens", f"packs documents into one row, but the batch has {batch} rows: use [1, total].")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ArgumentError(
            "cu_seqlens", f"has shape {list(cu_seqlens.shape)}, but must be [D + 1]: 0, the end of document 1, ..., {length}."
        )
    if cu_seqlens.is_meta:
        raise ArgumentError("cu_seqlens", "is on the meta device, where it has no values, but the layout needs them.")
    if torch.compiler.is_compiling():
        rises = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
        require(rises, "cu_seqlens", "must be nondecreasing from 0 to the number of tokens of the row.")
        return None
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
        raise ArgumentError(
            "cu_seqlens", f"is {shortened(ends)}, but must be nondecreasing from 0 to the {length} tokens of the row."
        )
    return [stop - start for start, stop in pairwise(ends)]


def as_mask(argument: str, mask: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor | None:
    """Convert a mask on the tokens' device to bool [batch, length]; ArgumentError unless it is bool or integers 0 and 1."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ArgumentError(argument, f"is a {type(mask).__name__}, but must be a tensor.")
    if mask.shape != (batch, length):
        raise ArgumentError(argument, f"has shape {list(mask.shape)}, but must be [B, T] = [{batch}, {length}].")
    if mask.device != device:
        raise ArgumentError(argument, f"is on {mask.device}, but must be on {device}, like the tokens.")
    if mask.dtype == torch.bool:
        return mask
    allowed = "must be torch.bool or integers 0 and 1; True and 1 are real tokens."
    if mask.is_floating_point() or mask.is_complex():
        raise ArgumentError(argument, f"has dtype {mask.dtype}, but {allowed}")
    require((mask == 0) | (mask == 1), argument, f"has values other than 0 and 1, but {allowed}")
    return mask != 0


def check_prefix_lengths(prefix_lengths: Tensor, counts: Tensor, of_rows: bool) -> Tensor:
    """Return the lengths of prefixes as int64 [D], for documents of `counts` real tokens, int64 [D].

    Raises:
        ArgumentError: if they do not match the documents; `of_rows` says that a document is a row, for messages.
    """
    size, where = ("[B]", "row") if of_rows else ("[D]", "document")
    check_whole("prefix_lengths", prefix_lengths)
    if prefix_lengths.shape != counts.shape:
        shape = f"has shape {list(prefix_lengths.shape)}, but must be {size} = {list(counts.shape)}."
        raise ArgumentError("prefix_lengths", shape)
    if prefix_lengths.is_meta and not counts.is_meta:
        raise ArgumentError("prefix_lengths", f"is on the meta device, but must be on {counts.device}, like the tokens.")
    lengths = prefix_lengths.to(counts.device, torch.long)
    given = f"is {shortened(lengths.tolist())}, but " if is_readable(lengths) else ""
    predicate = f"{given}must be from 0 to the number of real tokens of each {where}."
    require((lengths >= 0) & (lengths <= counts), "prefix_lengths", predicate)
    return lengths
