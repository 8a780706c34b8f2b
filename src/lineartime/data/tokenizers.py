"""Tokenizers: text to token ids and back, by bytes or any tokenizer of the Hugging Face `tokenizers` library, and training."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lineartime.choices import BYTE_VOCABULARY, VOCAB_SIZE
from lineartime.data.corpora import Corpus, no_text
from lineartime.data.readers import BLOCK
from lineartime.errors import (
    ArgumentError,
    LineartimeError,
    first_line,
    reporting_file_errors,
    require_packages,
    typed_first_line,
)
from lineartime.fields import AtLeastOne, Between, check_type
from lineartime.files import TOKENIZER_FILE, is_there, write_file
from lineartime.screen import Progress


class StreamDecoder:
    """Decodes new tokens together with those before them, because the text of a token can depend on its neighbours.

    The `DecodeStream` of the tokenizers library holds text back until it is valid, which bytes of an untrained model never are.
    A token may end one character and begin the next, so every token may end within a character. What is held back is therefore
    the end of the text, not tokens: an incomplete character reads as U+FFFD.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []  # the latest tokens whose whole text was returned
        self._waiting: list[int] = []  # those after them
        self._returned = 0  # the characters of both that were returned

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        self._waiting.append(token)
        text = self._decode(self._shown + self._waiting)
        piece = text[self._returned :].rstrip("\ufffd")
        self._returned += len(piece)
        if self._returned == len(text):
            # Some tokens have a text only beside others: the first token of a text loses its space.
            alone = self._decode(self._waiting)
            self._shown, self._waiting = self._waiting if alone else (self._shown + self._waiting)[:_KEPT], []
            self._returned = len(alone or self._decode(self._shown))
        return piece

    def flush(self) -> str:
        """Return the text held back, after the last token."""
        return self._decode(self._shown + self._waiting)[self._returned :]


_KEPT = 64  # tokens, the last of which have no text of their own
_HUB = "hub:"
MASK_TEXT, END_TEXT = "[MASK]", "[END]"
"""How a mask and an end of document are displayed."""
FRAME = ("[CLS]", "[SEP]")
"""The names of the tokens before and after a text that a masked language model reads."""


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # of Latin-1, which represent themselves
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]  # represented by the characters from U+0100 on
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}
"""The byte that each character of a byte-level piece represents."""
_NOTHING_BEFORE: dict[str, dict[str, Any]] = {
    "Prepend": {"prepend": ""},
    "Metaspace": {"prepend_scheme": "never", "add_prefix_space": False},
    "ByteLevel": {"add_prefix_space": False},
}


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; 256 ends a document and 257 masks a token."""

    vocab_size = BYTE_VOCABULARY
    end_of_document = 256
    mask = 257
    frame: tuple[int, int] | None = None

    def encode(self, text: str, inside: bool = False) -> NDArray[np.int64]:
        """The bytes of a text, also of one inside another: int64 [n]."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str], inside: bool = False) -> list[NDArray[np.int64]]:
        """The bytes of several texts; one core is enough to copy them."""
        return [self.encode(text) for text in texts]

    def beginning(self, text: str, n_tokens: int, inside: bool = False) -> str:
        """The part of a text that its first bytes encode, with the whole of a last character that they hold a part of."""
        return text[: len(self.decode(self.encode(text)[:n_tokens].tolist()))]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens; incomplete characters become U+FFFD."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder of tokens that arrive one by one."""
        return StreamDecoder(self.decode)

    def show(self, token: int) -> str:
        r"""A readable form of a token: its character, \xc3 for a part of one, or the name of a special token."""
        if token >= 256:
            return MASK_TEXT if token == self.mask else END_TEXT
        return bytes([token]).decode(errors="backslashreplace")

    def to_json(self) -> str:
        """A JSON text from which `tokenizer_from_json` restores the tokenizer, which has no parameters."""
        return json.dumps({"lineartime": "bytes"})


@contextmanager
def _library_errors(what: str, advice: str) -> Iterator[None]:
    """Turn an error of the tokenizers library, which raises plain Exception, or its panic into a LineartimeError."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise LineartimeError(f"{what} ({first_line(error):.300}){advice}") from None


def _parts_of(stage: Any) -> Iterator[dict[str, Any]]:
    """The parts of a stage of a definition, with sequences flattened."""
    if isinstance(stage, dict):
        yield stage
        for name in ("normalizers", "pretokenizers"):
            for part in stage.get(name, ()):
                yield from _parts_of(part)


class JsonTokenizer:
    """A tokenizer saved by the Hugging Face `tokenizers` library; missing end-of-document and mask tokens are added."""

    _END_NAMES = ("<|endoftext|>", "</s>", "<eos>", "[EOS]", "[SEP]", "<end_of_document>", END_TEXT)
    _MASK_NAMES = ("[MASK]", "<mask>")

    def __init__(self, definition: str, source: str) -> None:
        require_packages("tokenizers", extra="tokenizers", purpose=f"The tokenizer {source}")
        import tokenizers

        with _library_errors(f"{source} is not a tokenizer file", ": give a tokenizer.json of the tokenizers library."):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(definition)
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text and does not end it
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._definition = definition
        self._source = source
        if type(self._tokenizer.model).__name__ == "BPE":
            self._tokenizer.model.dropout = None  # which would give a text other tokens each time
        self._known: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end_of_document, size = self._special(self._END_NAMES, self._known)
        self.mask, self.vocab_size = self._special(self._MASK_NAMES, size)
        first, last = map(self._tokenizer.token_to_id, FRAME)
        self.frame: tuple[int, int] | None = None if first is None or last is None else (first, last)
        """The tokens before and after a text that a masked language model reads, [CLS] and [SEP]."""

    def _special(self, names: tuple[str, ...], size: int) -> tuple[int, int]:
        """The id of the first of these names that the tokenizer knows, or a new id; and the resulting vocabulary size."""
        known = [token for name in names if (token := self._tokenizer.token_to_id(name)) is not None]
        return (known[0], size) if known else (size, size + 1)

    def encode(self, text: str, inside: bool = False) -> NDArray[np.int64]:
        """The token ids of a text, without special tokens: int64 [n]; for one inside another, without what is put before."""
        return self.encode_batch([text], inside)[0]

    def encode_batch(self, texts: Sequence[str], inside: bool = False) -> list[NDArray[np.int64]]:
        """The token ids of several texts, on all cores: int64 [n] each."""
        return [np.array(each.ids, dtype=np.int64) for each in self._encodings(texts, inside)]

    def _encodings(self, texts: Sequence[str], inside: bool, with_places: bool = False) -> Any:
        tokenizer = self._inside if inside else self._tokenizer
        encode = tokenizer.encode_batch if with_places else tokenizer.encode_batch_fast
        with _library_errors(f"The tokenizer {self._source} cannot encode the text", "."):  # for instance an unknown word
            return encode(list(texts), add_special_tokens=False)

    @cached_property
    def _inside(self) -> Any:
        """The tokenizer without what it puts before a text."""
        definition = json.loads(self._definition)
        for part in chain(_parts_of(definition.get("normalizer")), _parts_of(definition.get("pre_tokenizer"))):
            part.update(_NOTHING_BEFORE.get(part.get("type", ""), {}))
        return JsonTokenizer(json.dumps(definition), self._source)._tokenizer

    def beginning(self, text: str, n_tokens: int, inside: bool = False) -> str:
        """The part of a text that its first tokens encode, with the whole of a last character that they hold a part of."""
        [encoding] = self._encodings([text], inside, with_places=True)
        return text[: max((end for _, end in encoding.offsets[:n_tokens]), default=0)]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        with _library_errors(f"The tokenizer {self._source} cannot decode tokens", "."):
            text: str = self._tokenizer.decode([token for token in ids if token < self._known])
        return text

    def stream_decoder(self) -> StreamDecoder:
        """A decoder of tokens that arrive one by one."""
        return StreamDecoder(self.decode)

    def show(self, token: int) -> str:
        r"""A readable form of a token: its text, the bytes of an incomplete character as \xc3, or its name."""
        if token in (self.mask, self.end_of_document):
            return MASK_TEXT if token == self.mask else END_TEXT
        text = self.decode([token])
        if text and "\ufffd" not in text:
            return text
        piece: str | None = self._tokenizer.id_to_token(token)
        if piece is None:  # a gap in the vocabulary
            return f"<{token}>"
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
        if byte:
            return f"\\x{byte[1].lower()}"
        written = [BYTE_LEVEL.get(character) for character in piece]
        whole = [byte for byte in written if byte is not None]
        return bytes(whole).decode(errors="backslashreplace") if len(whole) == len(written) else piece

    def to_json(self) -> str:
        """The tokenizer's own JSON."""
        return self._definition


Tokenizer = ByteTokenizer | JsonTokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a file, or from a folder with a tokenizer.json; `lineartime.load_tokenizer` also takes a run.

    Raises LineartimeError if the file cannot be read or is not a tokenizer.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return tokenizer_from_json(read_definition(file), str(file))


def tokenizer_from_json(definition: str, source: str) -> Tokenizer:
    """The tokenizer of a JSON text that `to_json` wrote, or of the tokenizers library; `source` names it in messages.

    Raises LineartimeError if the text does not define a tokenizer.
    """
    if definition == ByteTokenizer().to_json():
        return ByteTokenizer()
    return JsonTokenizer(definition, source)


def read_definition(file: Path) -> str:
    """Read the text of a definition. Raises LineartimeError if the file cannot be read or is not UTF-8."""
    try:
        with reporting_file_errors("read", file), file.open("rb") as opened:
            return opened.read().decode()
    except UnicodeDecodeError as error:
        what = f"{file} is not a tokenizer file (it is not UTF-8 at byte {error.start:,})"
        raise LineartimeError(f"{what}: give a tokenizer.json of the tokenizers library.") from None


def check_vocabulary(tokenizer: object, vocab_size: int) -> None:
    """Raise ArgumentError unless `tokenizer` is a tokenizer with the model's vocabulary size."""
    tokens = getattr(tokenizer, "vocab_size", None)
    if not isinstance(tokens, int) or not hasattr(tokenizer, "stream_decoder"):
        found = f"is of type {type(tokenizer).__name__}, but must be the tokenizer of the model"
        raise ArgumentError("tokenizer", f"{found}: load_tokenizer returns it.")
    if tokens != vocab_size:
        found = f"has {tokens:,} tokens, but the model's vocabulary has {vocab_size:,}"
        raise ArgumentError("tokenizer", f"{found}: give the tokenizer of the model's run.")


def encode_given(tokenizer: Tokenizer, argument: str, text: object, inside: bool = False) -> list[int]:
    """Encode a text from the user. Raises ArgumentError, naming the argument, unless it is a text that can be encoded."""
    if not isinstance(text, str):
        raise ArgumentError(argument, f"is of type {type(text).__name__}, but must be a text.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(argument, "is not UTF-8 text: convert it to UTF-8.") from None
    ids: list[int] = tokenizer.encode(text, inside).tolist()
    return ids


def fingerprint(tokenizer: Tokenizer) -> str:
    """A string that differs between tokenizers that encode differently."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


# Documents in parts ------------------------------------------------------------------------------------------------------

# Places at which tokenizers begin a word, whatever is before it, if its space belongs to it; lines are for text without spaces.
_WORD, _LINE = re.compile(r"(?<=\w)(?= \w)"), re.compile(r"(?<=\n)(?=\S)")


class Part(NamedTuple):
    """A part of a document."""

    text: str
    is_first: bool
    is_last: bool


def encoded(tokenizer: Tokenizer, documents: Iterable[Iterator[str]], size: int) -> Iterator[tuple[Part, NDArray[np.int64]]]:
    """Encode documents, each given as blocks of text, on all cores: yields the parts of each that has any text.

    A document of more than twice `size` characters is cut where words begin, so that it has the tokens of its whole text.
    """
    cut = chain.from_iterable(parts(document, size) for document in documents)
    while batch := list(_next(cut, size * (os.cpu_count() or 1))):
        begins, goes_on = (
            iter(tokenizer.encode_batch([part.text for part in batch if part.is_first == is_first], inside=not is_first))
            for is_first in (True, False)
        )
        for part in batch:
            yield part, next(begins if part.is_first else goes_on)


def _next(parts: Iterator[Part], length: int) -> Iterator[Part]:
    """The next parts, together of `length` characters or more."""
    while length > 0 and (part := next(parts, None)) is not None:
        yield part
        length -= len(part.text)


def parts(blocks: Iterator[str], size: int) -> Iterator[Part]:
    """Cut a document between words, or where there are none, between lines, or else anywhere."""
    text, is_first = "", True
    for block in blocks:
        text += block
        while len(text) > 2 * size:
            found = _WORD.search(text, size, 2 * size) or _LINE.search(text, size, 2 * size)
            cut = found.start() if found else 2 * size
            yield Part(text[:cut], is_first, False)
            text, is_first = text[cut:], False
    if text:
        yield Part(text, is_first, True)


# Training ----------------------------------------------------------------------------------------------------------------

_FORMAT = 5  # part of every cached file's name: increase it when the same text would give another tokenizer
_SPECIAL = ["<|endoftext|>", MASK_TEXT, *FRAME]
_LONG_SPACE = re.compile(r"\s{500}")
_LONG_RUN = re.compile(r"[^\W\d_]{500}|\d{500}|(?:[^\w\s]|_){500}|\s{500}")
"""Characters that would be one word, as DNA is. Merging pairs in a word takes a time that grows with its length squared."""
_SMALLEST, _LARGEST = 256 + len(_SPECIAL), 2**24
"""The sizes of a vocabulary: one for all bytes, and one above the largest in use, which the library can train."""
_TRAINING_BYTES = 1 << 30
"""The default of `max_bytes`."""


def train_tokenizer(corpus: Corpus, vocab_size: int, max_bytes: int | None = None) -> JsonTokenizer:
    """Train a tokenizer on the beginning of the training split, by byte-level BPE on all cores.

    Decoding restores every text exactly. `vocab_size` includes the end of a document, the mask, [CLS] and [SEP]; a short text
    gives fewer tokens. `max_bytes` of text are learned from, by default 2^30.

    Raises LineartimeError for a vocabulary too small for all bytes or too large, or a corpus without text.
    """
    check_tokenizer_options(vocab_size, max_bytes)
    require_packages("tokenizers", extra="tokenizers", purpose="Training a tokenizer")
    with Progress(f"training a tokenizer on {corpus.name}") as progress:
        texts = _texts(corpus, _TRAINING_BYTES if max_bytes is None else max_bytes, progress)
        first = next(texts, None)
        if first is None:
            raise no_text(f"the train split of {corpus.name}")
        definition = _train_bpe(chain([first], texts), vocab_size)
    return JsonTokenizer(definition, f"bpe of {corpus.name}")


def check_tokenizer_options(vocab_size: int, max_bytes: int | None) -> None:
    """Raise ArgumentError for an option that `train_tokenizer` does not take; a command calls this before it reads the text."""
    check_type("max_bytes", max_bytes, AtLeastOne | None)
    check_type("vocab_size", vocab_size, Annotated[int, Between(_SMALLEST, _LARGEST)])


def _texts(corpus: Corpus, limit: int, progress: Progress) -> Iterator[str]:
    """The training split in blocks that end between words, or in parts of overlong words, up to `limit` bytes."""
    for block in chain.from_iterable(parts(document, BLOCK) for document in corpus.documents("train")):
        text, size = block.text, len(block.text.encode())
        if size > limit:
            text = text.encode()[:limit].decode(errors="ignore") or text[:1]
        # The pattern alone would take a third of the time of training.
        has_long_run = max(map(len, text.split()), default=0) >= 500 or bool(_LONG_SPACE.search(text))
        cuts = [0, *(run.end() for run in _LONG_RUN.finditer(text if has_long_run else "")), len(text)]
        yield from (text[start:stop] for start, stop in pairwise(cuts))
        progress.advance(size)
        limit -= size
        if limit <= 0:
            return


def _train_bpe(texts: Iterator[str], vocab_size: int) -> str:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


# Names -------------------------------------------------------------------------------------------------------------------


def is_ready_name(choice: str) -> bool:
    """Whether `named_tokenizer` reads this as a name, not as a path."""
    return choice == "bytes" or choice.startswith(_HUB)


def named_tokenizer(choice: str) -> Tokenizer:
    """The tokenizer "bytes", that of a repository on the hub, such as hub:gpt2, or one at a path.

    Raises LineartimeError if there is none, or it cannot be read.
    """
    if choice == "bytes":
        return ByteTokenizer()
    if not choice.startswith(_HUB):
        return read_tokenizer(Path(choice))
    require_packages("tokenizers", "huggingface_hub", extra="tokenizers", purpose=f"The tokenizer {choice}")
    import huggingface_hub

    try:
        file = huggingface_hub.hf_hub_download(choice.removeprefix(_HUB), TOKENIZER_FILE)
    except Exception as error:  # network and hub errors
        found = f"is {choice}, which cannot be read from the Hugging Face hub ({typed_first_line(error)})"
        advice = "check the name and the network, or give the path of a tokenizer.json."
        raise ArgumentError("tokenizer", f"{found}: {advice}") from None
    return JsonTokenizer(read_definition(Path(file)), choice)


def is_tokenizer_name(choice: str) -> bool:
    """Whether `tokenizer_for` reads this as a name, not as a path."""
    return is_ready_name(choice) or size_to_train(choice) is not None


def size_to_train(choice: str) -> int | None:
    """The number of tokens in the name of a tokenizer to train, such as bpe-32000; None for other names and for paths."""
    found = re.fullmatch(r"(?:bpe|unigram)-(\d{1,20})", choice)  # earlier versions trained Unigram: their runs go on
    return int(found[1]) if found else None


def tokenizer_for(choice: str | Path | None, corpus: Corpus, cache: Path) -> Tokenizer:
    """Return the tokenizer for a name or a path: "bytes" or None, a file or a checkpoint folder, or one on the hub (hub:gpt2).

    "bpe-32000", with the size of the vocabulary, is trained on the corpus the first time and kept in the cache, a folder.
    Raises LineartimeError for any other choice, and for errors in training or reading the tokenizer.
    """
    name = "bytes" if choice is None else str(choice)
    vocab_size = size_to_train(name) if not isinstance(choice, Path) else None
    if not name:
        raise ArgumentError("tokenizer", "is empty: give a name or a path, or leave it out.")
    if vocab_size is None and not is_ready_name(name) and not is_there(name):
        known = f"use bytes, bpe-{VOCAB_SIZE}, hub:NAME or the path of a tokenizer.json."
        raise ArgumentError("tokenizer", f"is {choice}, which is neither a file nor a name: {known}")
    if vocab_size is None:
        return named_tokenizer(name)
    if not name.startswith("bpe"):
        others = "train another one by the tokenizers library, and give the path of its tokenizer.json"
        raise ArgumentError("tokenizer", f"is {name}, but only BPE is trained: use bpe-{vocab_size}, or {others}.")
    if not _SMALLEST <= vocab_size <= _LARGEST:
        raise ArgumentError("tokenizer", f"is {name}, but bpe tokenizers have from {_SMALLEST:,} to {_LARGEST:,} tokens.")
    key = "\n".join([str(_FORMAT), name, str(_TRAINING_BYTES), corpus.identity("train")])
    file = cache / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:20]}.tokenizer.json"
    if not file.exists():
        write_file(file, train_tokenizer(corpus, vocab_size).to_json())
    return read_tokenizer(file)
