"""Where the tokens of a long text can be joined from those of its parts."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SURE = 16
"""On each side of a seam, the number of tokens that are the same whatever else a text holds."""


class Seam(NamedTuple):
    """A place at which the tokens of a long text can be joined from those of two parts.

    Attributes:
        text: a short text around it, with which the first part ends and the second begins.
        ids: its tokens.
        before: the number of these before the seam.
        end: the number of characters that the tokens before the seam encode, with the whole of a last one.
    """

    text: str = ""
    ids: NDArray[np.int64] = np.zeros(0, np.int64)
    before: int = 0
    end: int = 0

    def joins(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> bool:
        """Whether both parts have the tokens of the short text around the seam, and from there to where it ends or begins."""
        last, beginning = self.ids[max(0, self.before - SURE) :], self.ids[: self.before + SURE]
        return np.array_equal(first[-len(last) :], last) and np.array_equal(second[: len(beginning)], beginning)


def find_seam(text: str, encodings: Sequence[Any], *, within_words: bool) -> Seam | None:
    """A place in a short text, in its middle if possible, at which the tokens of a longer one can be joined.

    It is the start of a word, because words are encoded independently. Within a word, BPE alone can be joined: its tokens are
    right if each two adjacent ones are. The place must not depend on where the text begins or ends: whatever groups characters
    by number, as digits by three, groups those of a text that begins one later in another way.

    Args:
        text: the text.
        encodings: of the text, and of the text without its first and last character, by the tokenizers library.
        within_words: whether the tokenizer is BPE.
    """
    tokens, shorter = (
        [
            (word != previous, start + shift, end + shift, token)
            for word, previous, (start, end), token in zip(x.word_ids, [None, *x.word_ids], x.offsets, x.ids, strict=False)
        ]
        for shift, x in enumerate(encodings)
    )
    place_in_shorter = {token: place for place, token in enumerate(shorter)}
    places = [
        (not begins_word, abs(start - len(text) // 2), place)
        for place, (begins_word, start, _, _) in enumerate(tokens)
        if SURE <= place <= len(tokens) - SURE and (begins_word or within_words)
    ]
    for _, _, place in sorted(places):
        other = place_in_shorter.get(tokens[place], 0)
        if other >= SURE and tokens[place - SURE : place + SURE] == shorter[other - SURE : other + SURE]:
            return Seam(text, np.array(encodings[0].ids), place, tokens[place - 1][2])
    return None
