"""Detect prose, the only kind of text for which measures per word are meaningful."""

import re

_WORD = re.compile(r"""["'(\[\u201c\u2018_*]*[^\W\d_]+(?:[-'\u2019][^\W\d_]+)*["'\u201d\u2019.,;:!?)\]_*]*(?:--)?""")
_SIGNS = re.compile(r"""[-.,;:!?"'()\u2013\u2014]+""")
_SHARE = 0.8
"""The threshold, between source code (0.5 to 0.75) and Wikipedia with its markup (0.85); books have 0.99."""


def is_prose(text: str) -> bool:
    """Whether more than 80% of whitespace-separated pieces are words, ignoring punctuation around them or on its own."""
    pieces = [piece for piece in text.split() if not _SIGNS.fullmatch(piece)]
    return sum(_WORD.fullmatch(piece) is not None for piece in pieces) > _SHARE * len(pieces)
