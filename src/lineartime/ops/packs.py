"""Groups of documents of similar length in a pack, so that none is padded to the length of a much longer one.

A mixer computes documents as rows that are as long as the longest, or as chunks. One long document among thousands of short
ones would make thousands of long rows, nearly all padding. The documents of such a pack are computed in a few groups instead.
"""

from itertools import pairwise
from typing import NamedTuple

MAX_GROUPS = 4
"""The maximum number of groups in a pack. Code is compiled for each number of groups."""
WASTE = 4
"""Two groups are merged if the padding adds at most 1 / WASTE to the cost of the pack."""
GROUP_COST = 2**18
"""The cost of the operations of one more group, in scores: about a millisecond on a CPU."""
SLOT_COST = 128
"""The cost of the other computations for each slot of a row, padding included, in scores."""


class _Group(NamedTuple):
    """Documents that are computed together, and the number of tokens of the longest."""

    documents: list[int]
    longest: int

    @property
    def cost(self) -> int:
        """The cost in scores of an attention in which every slot of a row attends to every slot."""
        return len(self.documents) * self.longest * (self.longest + SLOT_COST)

    def joined(self, other: "_Group") -> "_Group":
        return _Group(self.documents + other.documents, max(self.longest, other.longest))


def similar_documents(lengths: list[int]) -> list[list[int]]:
    """Group the documents to compute together, shortest first and each group in order; leave out those without tokens.

    Args:
        lengths: the number of tokens of each document.
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
        if len(groups) <= MAX_GROUPS and added > max(GROUP_COST, least // WASTE):
            break
        at = padding.index(added)
        groups[at : at + 2] = [groups[at].joined(groups[at + 1])]
    return [sorted(group.documents) for group in groups]
