"""Groups of documents of similar length in a pack, so that none is padded to the length of a much longer one.

A mixer computes documents as rows that are as long as the longest, or as chunks. One long document among thousands of short
ones would make thousands of long rows, nearly all padding. The documents of such a pack are computed in a few groups instead.
"""

from itertools import groupby, pairwise

MAX_GROUPS = 4
"""The maximum number of groups in a pack. Code is compiled for each number of groups."""
WASTE = 4
"""Two groups are merged if the padding adds at most 1 / WASTE to the cost of the pack."""
GROUP_COST = 2**18
"""The cost of the operations of one more group, in scores: about a millisecond on a CPU."""
SLOT_COST = 128
"""The cost of the other computations for each slot of a row, padding included, in scores."""


def similar_documents(lengths: list[int]) -> list[list[int]]:
    """Group the documents to compute together, shortest first and each group in order; leave out those without tokens.

    Args:
        lengths: the number of tokens of each document.
    """
    by_length = sorted((document for document, tokens in enumerate(lengths) if tokens), key=lengths.__getitem__)
    groups = [list(group) for _, group in groupby(by_length, lambda document: (lengths[document] - 1).bit_length())]

    def cost(group: list[int]) -> int:
        """In scores of an attention in which every slot of a row attends to every slot; rows are as long as the last."""
        longest = lengths[group[-1]]
        return len(group) * longest * (longest + SLOT_COST)

    least = sum(map(cost, groups))
    while len(groups) > 1:
        padding = [cost(one + other) - cost(one) - cost(other) for one, other in pairwise(groups)]
        added = min(padding)
        if len(groups) <= MAX_GROUPS and added > max(GROUP_COST, least // WASTE):
            break
        at = padding.index(added)
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return [sorted(group) for group in groups]
