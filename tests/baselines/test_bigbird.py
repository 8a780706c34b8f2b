"""BigBird: which blocks are drawn."""

import torch
from tests.pairs import every_pair

from lineartime.baselines.sparse import choose_blocks

SEEDS = torch.tensor([1, 2**32 - 1])


def drawn(count: int, causal: bool = True) -> list[list[list[int]]]:
    """The random blocks of every block of a document with so many, for both heads; the first two are global."""
    block = torch.arange(count)
    n_blocks = block + 1 if causal else torch.full_like(block, count)
    chosen, there = choose_blocks(SEEDS, block, n_blocks, n_global=2, n_random=3)
    return [[chosen[head, g][there[head, g]].tolist() for g in range(count)] for head in range(2)]


@every_pair(causal=[False, True], count=[1, 2, 5, 7, 40])
def test_random_blocks_are_distinct_and_neither_near_nor_global(causal: bool, count: int) -> None:
    for head in drawn(count, causal):
        for g, chosen in enumerate(head):
            others = [b for b in range(2, g + 1 if causal else count) if abs(b - g) > 1]
            assert set(chosen) <= set(others)
            assert len(set(chosen)) == len(chosen) == min(3, len(others))


def test_random_blocks_of_a_causal_block_do_not_depend_on_what_follows() -> None:
    assert [head[:25] for head in drawn(40)] == drawn(25)


def test_every_other_block_is_drawn_about_as_often() -> None:
    last = torch.tensor([21])  # its others: blocks 1 to 19 of a causal row
    chosen, there = choose_blocks(torch.randint(2**32, (4000,)), last, last + 1, n_global=1, n_random=1)
    assert there.all()
    counts = chosen.flatten().bincount(minlength=20)[1:]
    assert len(counts) == 19
    assert ((counts > 150) & (counts < 280)).all()  # 210 each
