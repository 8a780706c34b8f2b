"""Whether a text is prose, for which alone words are a measure."""

import re

_WORD = re.compile(r"""["'(\[\u201c\u2018_*]*[^\W\d_]+(?:[-'\u2019][^\W\d_]+)*["'\u201d\u2019.,;:!?)\]_*]*(?:--)?""")
_SIGNS = re.compile(r"""[-.,;:!?"'()\u2013\u2014]+""")
_SHARE = 0.8
"""Between source code, 0.5 to 0.75, and Wikipedia with its markup, 0.85; books have 0.99."""


def is_prose(text: str) -> bool:
    """Whether four of five pieces between white space are words, with the signs around them; signs alone do not count."""
    pieces = [piece for piece in text.split() if not _SIGNS.fullmatch(piece)]
    return sum(_WORD.fullmatch(piece) is not None for piece in pieces) > _SHARE * len(pieces)
