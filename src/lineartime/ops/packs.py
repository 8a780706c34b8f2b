"""Which documents of a pack are read together: those of similar length, so that none is padded to that of a far longer one.

A mixer reads documents as rows that are as long as the longest, or as chunks. One long document among thousands of short ones
would make thousands of long rows, nearly all padding. The documents of such a pack are read in a few groups instead.
"""

from itertools import pairwise
from typing import NamedTuple

MOST_GROUPS = 4
"""Groups of a pack at the most. Compiled code is compiled for each number of groups."""
WASTE = 4
"""Two groups are read together where padding adds less than one part in so many to the cost of the pack."""
OVERHEAD = 2**18
"""Scores that cost as much as the operations of one more group, about a millisecond on a processor."""
LINEAR = 128
"""Scores that cost as much as what is computed for each slot of a row, its padding included."""


class _Group(NamedTuple):
    """Documents that are read together, and the tokens of the longest."""

    documents: list[int]
    longest: int

    @property
    def cost(self) -> int:
        """In scores, of an attention in which each slot of a row reads each other."""
        return len(self.documents) * self.longest * (self.longest + LINEAR)

    def joined(self, other: "_Group") -> "_Group":
        return _Group(self.documents + other.documents, max(self.longest, other.longest))


def similar_documents(lengths: list[int]) -> list[list[int]]:
    """The documents to read together, each group in order and that of the shortest first; those without tokens are left out.

    Args:
        lengths: the tokens of each document.
    """
    by_power: dict[int, list[int]] = {}
    for document, tokens in enumerate(lengths):
        if tokens:
            by_power.setdefault((tokens - 1).bit_length(), []).append(document)
    groups = [_Group(found, max(lengths[document] for document in found)) for _, found in sorted(by_power.items())]
    least = sum(group.cost for group in groups)
    while len(groups) > 1:
        padding = [one.joined(other).cost - one.cost - other.cost for one, other in pairwise(groups)]
        added = min(padding)
        if len(groups) <= MOST_GROUPS and added > max(OVERHEAD, least // WASTE):
            break
        at = padding.index(added)
        groups[at : at + 2] = [groups[at].joined(groups[at + 1])]
    return [sorted(group.documents) for group in groups]
