"""Prefixes: the first tokens of a document, within which a causal attention is bidirectional.

Shapes: N tokens of a pack, D documents.
"""

import torch
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.checks import check_whole, is_readable, require, shortened


def check_prefix(prefix_lengths: Tensor | None, causal: bool) -> None:
    """Raise ArgumentError if prefixes are given for an attention that is not causal."""
    if prefix_lengths is not None and not causal:
        raise ArgumentError("prefix_lengths", "is given, but only causal attention has prefixes: use causal=True.")


def prefix_tokens(
    prefix_lengths: Tensor, positions: Tensor, document: Tensor, starts: Tensor, is_real: Tensor | None, of_rows: bool
) -> Tensor:
    """Which tokens of a pack are in a prefix, bool [1, N].

    Args:
        prefix_lengths: int [D].
        positions, document: int64 [N], the position of each token in its document, and the document.
        starts: int64 [D + 1], the boundaries of the documents.
        is_real: bool [1, N], or None if all tokens are real.
        of_rows: whether a document is a row of a batch, for messages.

    Raises:
        ArgumentError: if the lengths do not match the documents.
    """
    n_documents, size, where = starts.shape[0] - 1, "[B]" if of_rows else "[D]", "row" if of_rows else "document"
    check_whole("prefix_lengths", prefix_lengths)
    if prefix_lengths.shape != (n_documents,):
        raise ArgumentError("prefix_lengths", f"has shape {list(prefix_lengths.shape)}, but must be {size} = [{n_documents}].")
    if prefix_lengths.is_meta and not positions.is_meta:
        raise ArgumentError("prefix_lengths", f"is on the meta device, but must be on {positions.device}, like the tokens.")
    lengths = prefix_lengths.to(positions.device, torch.long)
    given = f"is {shortened(lengths.tolist())}, but " if is_readable(lengths) else ""
    predicate = f"{given}must be from 0 to the number of real tokens of each {where}."
    require((lengths >= 0) & (lengths <= starts.diff()), "prefix_lengths", predicate)
    marked = (positions < lengths[document])[None]
    return marked if is_real is None else marked & is_real
