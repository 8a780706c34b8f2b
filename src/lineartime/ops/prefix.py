"""Prefixes: the first tokens of a document, within which a causal attention is bidirectional.

Shapes: B batch, T tokens, D documents packed into a single row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lineartime.errors import ArgumentError
from lineartime.ops.checks import check_whole, is_readable, require, shortened


def check_prefix(prefix_lengths: Tensor | None, causal: bool) -> None:
    """Raise ArgumentError if prefixes are given for an attention that is not causal."""
    if prefix_lengths is not None and not causal:
        raise ArgumentError("prefix_lengths", "is given, but only causal attention has prefixes: use causal=True.")


def prefix_tokens(
    prefix_lengths: Tensor, batch: int, positions: Tensor, mask: Tensor | None, document: Tensor | None, starts: Tensor | None
) -> Tensor:
    """Which tokens are in a prefix, bool [B, T].

    Args:
        prefix_lengths: int [B], or [D] for packed documents.
        batch: B.
        positions: int [T] or [B, T], the position of each token in its document, counting only real tokens.
        mask: bool [B, T], True for real tokens, or None if all are real.
        document: int [T], the document of each token, or None if every row is one document.
        starts: int [D + 1], the boundaries of packed documents, or None if every row is one document.

    Raises:
        ArgumentError: if the lengths do not match the documents.
    """
    n_documents, size = (batch, "[B]") if starts is None else (starts.shape[0] - 1, "[D]")
    check_whole("prefix_lengths", prefix_lengths)
    if prefix_lengths.shape != (n_documents,):
        raise ArgumentError("prefix_lengths", f"has shape {list(prefix_lengths.shape)}, but must be {size} = [{n_documents}].")
    if prefix_lengths.is_meta and not positions.is_meta:
        raise ArgumentError("prefix_lengths", f"is on the meta device, but must be on {positions.device}, like the tokens.")
    lengths = prefix_lengths.to(positions.device, torch.long)
    real = torch.ones_like(positions, dtype=torch.bool).expand(batch, -1) if mask is None else mask
    if document is None or starts is None:
        limit, available = lengths[:, None], real.sum(1)
    else:
        limit, available = lengths[document], F.pad(real[0].cumsum(0), (1, 0))[starts].diff()
    given = f"is {shortened(lengths.tolist())}, but " if is_readable(lengths) else ""
    where = "row" if document is None else "document"
    predicate = f"{given}must be from 0 to the number of real tokens of each {where}."
    require((lengths >= 0) & (lengths <= available), "prefix_lengths", predicate)
    return (positions < limit) & real
