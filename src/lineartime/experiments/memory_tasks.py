"""Generated tasks for a long memory: token ids, and at each token the answer that is asked there, -100 where none is.

Shapes: B rows, T tokens, N tokens to remember.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lineartime.choices import BYTE_VOCABULARY, MemoryTask
from lineartime.data import Batch, TokenStream, read_window
from lineartime.ops.cross_entropy import IGNORED

KEYS, SYMBOLS, FEW_SYMBOLS = 64, 64, 16
"""The keys, and as many values, of recall, unless there are too many pairs; the symbols of copying, and of the other tasks."""
POWER = 0.01
"""The parameter a of Zoology's power law."""
SENTENCE, QUESTION, DIGITS = " The magic number is {}. ", " The magic number is ", 5
"""A needle, the question at the end of the haystack, and the digits of the number."""


def distinct(rows: int, kinds: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different numbers below `kinds` for each row: [B, count]."""
    return torch.rand(rows, kinds, generator=generator).argsort(1)[:, :count]


def key_count(pairs: int) -> int:
    """The number of keys in the vocabulary of recall, which is that of values, too."""
    return max(KEYS, 4 * pairs)


def recall(rows: int, length: int, pairs: int, generator: torch.Generator, kinds: int | None = None) -> Batch:
    """Multi-query associative recall: keys and values in turn, then each key once more, where its value is asked.

    The i-th key returns at the place 2 g of the rest, which is filler otherwise. The places g = 0, 1, ... are drawn without
    replacement by their weights (g + 1)^(a - 1). Ids are keys, then values, then the filler. Source: Zoology, arXiv 2312.04927,
    with the filler of its published settings.
    """
    shown, kinds = 2 * pairs, kinds or key_count(pairs)
    keys, values = distinct(rows, kinds, pairs, generator), kinds + distinct(rows, kinds, pairs, generator)
    inputs = torch.full((rows, length), 2 * kinds)
    targets = torch.full_like(inputs, IGNORED)
    inputs[:, 0:shown:2], inputs[:, 1:shown:2] = keys, values
    weights = torch.arange(1, (length - shown) // 2 + 1).float() ** (POWER - 1)
    places = shown + 2 * torch.multinomial(weights.expand(rows, -1), pairs, generator=generator)
    return Batch(inputs.scatter(1, places, keys), targets.scatter(1, places, values))


def recall_training(rows: int, length: int, pairs: int, generator: torch.Generator) -> Batch:
    """Texts to learn `recall` from: of `pairs` over any power of two, and half of the time with a question at each token.

    What few pairs teach is needed for many, with which alone most systems learn nothing in thousands of steps. Source: the
    pairs are a curriculum as in Zoology's experiments; the questions are ours.
    """
    fewer = pairs >> int(torch.randint(pairs.bit_length(), (), generator=generator))
    batch, shown = recall(rows, length, fewer, generator, key_count(pairs)), 2 * fewer
    if torch.rand((), generator=generator) < 0.5:
        return batch
    asked = torch.randint(fewer, (rows, length - shown), generator=generator)
    keys, values = batch.inputs[:, 0:shown:2].gather(1, asked), batch.inputs[:, 1:shown:2].gather(1, asked)
    return Batch(torch.cat([batch.inputs[:, :shown], keys], 1), torch.cat([batch.targets[:, :shown], values], 1))


def copying(rows: int, length: int, _: int, generator: torch.Generator) -> Batch:
    """N = T / 2 random symbols, a separator, and the symbols once more: each is asked at the token before it."""
    symbols = torch.randint(SYMBOLS, (rows, length // 2), generator=generator)
    separator, nothing = torch.full((rows, 1), SYMBOLS), torch.full_like(symbols, IGNORED)
    return Batch(torch.cat([symbols, separator, symbols[:, :-1]], 1), torch.cat([nothing, symbols], 1))


def induction(rows: int, length: int, _: int, generator: torch.Generator) -> Batch:
    """Random symbols, among them one special token, which also is the last token: there its follower is asked.

    Source: induction heads, H3, arXiv 2212.14052.
    """
    inputs = torch.randint(FEW_SYMBOLS, (rows, length), generator=generator)
    targets = torch.full_like(inputs, IGNORED)
    place = torch.randint(length - 2, (rows, 1), generator=generator)
    targets[:, -1:] = inputs.gather(1, place + 1)
    inputs.scatter_(1, place, FEW_SYMBOLS)[:, -1] = FEW_SYMBOLS
    return Batch(inputs, targets)


def selective_copying(rows: int, length: int, pairs: int, generator: torch.Generator) -> Batch:
    """N symbols at random places among noise, then N marks, where the symbols are asked in their order.

    Source: Mamba, arXiv 2312.00752.
    """
    symbols = torch.randint(FEW_SYMBOLS, (rows, pairs), generator=generator)
    places = distinct(rows, length - pairs, pairs, generator).sort(1).values
    inputs = torch.full((rows, length), FEW_SYMBOLS)
    inputs[:, -pairs:] = FEW_SYMBOLS + 1
    targets = torch.full_like(inputs, IGNORED)
    targets[:, -pairs:] = symbols
    return Batch(inputs.scatter(1, places, symbols), targets)


def needle(rows: int, length: int, generator: torch.Generator, text: TokenStream, depth: float | None = None) -> Batch:
    """Bytes of a text with a sentence that tells a random number, which is asked digit by digit at the end.

    `depth` is the share of the text before the sentence; None draws another one for each row.
    """
    numbers = torch.randint(10**DIGITS, (rows,), generator=generator).tolist()
    depths = torch.rand(rows, generator=generator).tolist() if depth is None else [depth] * rows
    around = length + 1 - len(SENTENCE.format("0" * DIGITS) + QUESTION) - DIGITS  # bytes of the text
    starts = (torch.rand(rows, generator=generator).double() * max(1, len(text) - around)).long().tolist()
    read = []
    for number, share, start in zip(numbers, depths, starts, strict=True):
        digits, cut, around_it = f"{number:0{DIGITS}}", round(share * around), read_window(text, start, around)
        read.append(torch.cat([around_it[:cut], _bytes(SENTENCE.format(digits)), around_it[cut:], _bytes(QUESTION + digits)]))
    ids = torch.stack(read)
    targets = torch.full((rows, length), IGNORED)
    targets[:, -DIGITS:] = ids[:, -DIGITS:]
    return Batch(ids[:, :-1], targets)


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


@dataclass(frozen=True)
class TaskTexts:
    """How the texts of a task are made, by functions (rows, length, pairs, generator) -> batch."""

    vocab_size: Callable[[int], int]  # of its vocabulary, from the pairs
    draw: Callable[[int, int, int, torch.Generator], Batch] | None  # None for `needle`, which reads a text
    shortest: Callable[[int], int]  # the fewest tokens of a text, from the pairs
    takes_pairs: bool = False  # whether it has a number of tokens to remember beside its length
    training: Callable[[int, int, int, torch.Generator], Batch] | None = None  # where training differs


TASKS: dict[MemoryTask, TaskTexts] = {
    "recall": TaskTexts(lambda pairs: 2 * key_count(pairs) + 1, recall, lambda pairs: 4 * pairs, True, recall_training),
    "copying": TaskTexts(lambda _: SYMBOLS + 1, copying, lambda _: 4),
    "induction": TaskTexts(lambda _: FEW_SYMBOLS + 1, induction, lambda _: 4),
    "selective-copying": TaskTexts(lambda _: FEW_SYMBOLS + 2, selective_copying, lambda pairs: 2 * pairs, takes_pairs=True),
    "needle": TaskTexts(lambda _: BYTE_VOCABULARY, None, lambda _: 64),
}
