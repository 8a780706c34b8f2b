"""BigBird: the parallel and the streaming form against the definition, and which blocks are drawn."""

from collections.abc import Callable

import torch
from tests.pairs import every_pair
from torch import Tensor

from lineartime.baselines.bigbird import (
    BigBird,
    bigbird_attention,
    bigbird_attention_extend,
    bigbird_attention_oracle,
    choose_blocks,
)
from lineartime.ops import KVCache
from lineartime.ops.make_batch import stream_batch

SEEDS = torch.tensor([1, 2**32 - 1])
SIZES = {"n_global": 1, "n_random": 2}


def blocks_of(length: int, block_size: int, causal: bool, n_global: int, n_random: int) -> list[list[list[int]]]:
    """The random blocks of every block of a document, for both heads."""
    count = -(-length // block_size)
    block = torch.arange(count)
    n_blocks = block + 1 if causal else torch.full_like(block, count)
    chosen, there = choose_blocks(SEEDS, block, n_blocks, n_global=n_global, n_random=n_random)
    return [[chosen[head, g][there[head, g]].tolist() for g in range(count)] for head in range(2)]


@every_pair(length=[1, 3, 7, 16, 23], causal=[False, True], sizes=[(1, 2, 3), (2, 1, 2), (30, 1, 1)])
def test_values_and_gradients_are_those_of_the_definition(
    length: int, causal: bool, sizes: tuple[int, int, int], assert_heads_are_the_definition: Callable[..., None]
) -> None:
    block_size, n_global, n_random = sizes
    options = {"block_size": block_size, "n_global": n_global, "causal": causal}

    def definition(head: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = blocks_of(len(q), block_size, causal, n_global, n_random)
        return bigbird_attention_oracle(q, k, v, chosen[head], **options)

    assert_heads_are_the_definition(
        lambda q, k, v, real: bigbird_attention(q, k, v, SEEDS, **options, n_random=n_random, real=real),
        definition,
        *(torch.randn(2, 2, length, 6) for _ in range(3)),
    )


@every_pair(causal=[False, True], count=[1, 2, 4, 5, 7, 12, 40])
def test_random_blocks_are_distinct_and_neither_near_nor_global(causal: bool, count: int) -> None:
    for head in blocks_of(count, 1, causal, n_global=2, n_random=3):
        for g, chosen in enumerate(head):
            others = [b for b in range(2, g + 1 if causal else count) if abs(b - g) > 1]
            assert set(chosen) <= set(others)
            assert len(set(chosen)) == len(chosen) == min(3, len(others))


def test_random_blocks_of_a_causal_block_do_not_depend_on_what_follows() -> None:
    long, short = (blocks_of(count, 1, causal=True, **SIZES) for count in (40, 25))
    assert [head[:25] for head in long] == short


def test_every_other_block_is_drawn_about_as_often() -> None:
    seeds = torch.randint(2**32, (4000,))
    last = torch.tensor([21])  # its others: blocks 1 to 19 of a causal row
    chosen, there = choose_blocks(seeds, last, last + 1, n_global=1, n_random=1)
    assert there.all()
    counts = chosen.flatten().bincount(minlength=20)[1:]
    assert len(counts) == 19
    assert ((counts > 150) & (counts < 280)).all()  # 210 each


def test_heads_and_layers_draw_other_blocks() -> None:
    one, other = blocks_of(40, 1, causal=True, **SIZES)
    assert one != other
    assert not torch.equal(BigBird(16, n_heads=2).seeds, BigBird(16, n_heads=2).seeds)


def test_a_stream_reads_what_the_parallel_form_reads() -> None:
    q, k, v = (torch.randn(2, 2, 53, 6, dtype=torch.float64) for _ in range(3))
    state, pieces = KVCache(torch.zeros(2, dtype=torch.long), k[:, :, :0], v[:, :, :0]), []
    for new in (slice(0, 2), slice(2, 2), slice(2, 30), slice(30, 53)):
        parts = q[:, :, new], k[:, :, new], v[:, :, new]
        batch = stream_batch(state.position, (2, parts[0].shape[2]))
        piece, state = bigbird_attention_extend(*parts, state, batch, SEEDS, block_size=3, **SIZES)
        pieces.append(piece)
    whole = bigbird_attention(q, k, v, SEEDS, block_size=3, **SIZES, causal=True)
    torch.testing.assert_close(torch.cat(pieces, 2), whole, atol=1e-10, rtol=0)
