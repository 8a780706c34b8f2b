"""Decoders of tokens that arrive one by one, which hold back incomplete characters."""

import codecs
from collections.abc import Callable


class ByteStreamDecoder:
    """Decodes bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def flush(self) -> str:
        """Return the text held back, after the last token."""
        return self._decoder.decode(b"", final=True)


class JsonStreamDecoder:
    """Decodes new tokens together with those before them, because the text of a token can depend on its neighbours.

    The `DecodeStream` of the tokenizers library holds text back until it is valid, which bytes of an untrained model never are.
    A token may end one character and begin the next, so every token may end within a character. What is held back is therefore
    the end of the text, not tokens: an incomplete character reads as U+FFFD.
    """

    _MOST = 64
    """The maximum number of tokens that are decoded together, besides those whose text is complete."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []  # the latest tokens whose whole text was returned
        self._waiting: list[int] = []  # those after them
        self._returned = 0  # the characters of both that were returned

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        self._waiting.append(token)
        text = self._decode(self._shown + self._waiting)
        return self._return(text, len(text.rstrip("\ufffd")))

    def flush(self) -> str:
        """Return the text held back, after the last token."""
        text = self._decode(self._shown + self._waiting)
        return self._return(text, len(text))

    def _return(self, text: str, end: int) -> str:
        """Return the text up to `end`, as far as it is new, and forget the tokens that are no longer needed."""
        piece = text[self._returned : end]
        self._returned = max(self._returned, end)
        if end == len(text):
            # Some tokens have a text only beside others: the first token of a text loses its space.
            alone = self._decode(self._waiting)
            self._shown, self._waiting = self._waiting if alone else (self._shown + self._waiting)[: self._MOST], []
            self._returned = len(alone or self._decode(self._shown))
        elif len(self._waiting) > self._MOST:  # the text of the later half ends in the same way
            self._shown, self._waiting = [], self._waiting[self._MOST // 2 :]
            later = len(self._decode(self._waiting))
            if len(text) - end > later:  # not characters, but bytes that are none
                piece, end = piece + text[end : len(text) - later], len(text) - later
            self._returned = later - (len(text) - end)
        return piece
