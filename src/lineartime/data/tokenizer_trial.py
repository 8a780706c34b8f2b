"""Check the definition of a tokenizer before this process loads it with the Rust library.

The library trusts its files: some make it panic, use all memory or never finish. How much a text can grow is computed from the
definition. A definition with parts that are not known to be harmless is first tried in a separate process with limits.
"""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lineartime.errors import LineartimeError, first_line
from lineartime.fields import shown
from lineartime.json_files import parse

MAX_BYTES = 1 << 28
"""The maximum size of a definition, in bytes."""
MAX_GROWTH = 32
"""The maximum number of characters that one character may become; U+FDFA becomes 18 in Unicode itself."""
_SECONDS = 10
"""The time limit of a trial, plus the same again for each 2^24 bytes of the definition."""
_MEMORY = 1 << 32
"""The limit on the address space of a trial, plus 64 bytes for each byte of the definition."""

_HARMLESS = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer"),
    *("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "Digits", "UnicodeScripts", "Split"),
    *("ByteLevel", "Metaspace", "Sequence", "Replace", "Prepend", "ByteFallback", "Fuse"),
    *("BPE", "Unigram", "WordLevel"),
}
"""The parts that no option can make fail, except for BPE with a prefix, which counts in bytes."""

_TRIAL = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
except (ImportError, OSError, ValueError):
    pass
from tokenizers import Tokenizer
texts = ["a", "ab ab\\n", "The  quick brown fox, 12.5!", "na\\u00efve \\u65e5\\u672c \\U0001f680 \\ufdfa\\0<0x0A>"]
try:
    tokenizer = Tokenizer.from_str(sys.stdin.buffer.read().decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = sorted({*tokenizer.get_vocab().values()})[:300]
    actions = [lambda text=text: tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    actions += [lambda token=token: tokenizer.decode([token]) for token in tokens]
    for action in actions:
        try:
            action()
        except Exception:
            pass
except Exception:
    pass
except BaseException as error:
    print(ascii(str(error).partition("\\n")[0][:200])[1:-1])
    sys.exit(3)
"""
"""The code of the trial. It ignores regular errors of the library: they are raised and caught when this process loads it."""


@contextmanager
def no_panics(source: str) -> Iterator[None]:
    """Turn a panic of the Rust library in a `with` block into a LineartimeError that names the tokenizer."""
    try:
        yield
    except BaseException as error:  # a panic is not an Exception
        if type(error).__name__ != "PanicException":
            raise
        raise _unusable(source, f"the tokenizers library fails on it: {first_line(error):.200}") from None


def check_definition(definition: str, source: str) -> None:
    """Raise LineartimeError, naming the `source`, for a definition that is unsafe to load.

    Invalid but safe definitions pass: the library reports them when it loads them.
    """
    what = _problem(definition)
    if what:
        raise _unusable(source, what)


def _unusable(source: str, what: str) -> LineartimeError:
    return LineartimeError(f"{source} is not a tokenizer file that can be used ({what}): give another tokenizer.json.")


@lru_cache(maxsize=16)
def _problem(definition: str) -> str:
    """Why a definition is unsafe to load, as a clause; empty if it is safe."""
    try:
        plain = parse(definition.encode())
    except ValueError as error:
        return str(error)
    if not isinstance(plain, dict):
        return f"it is {shown(plain)}, but must be an object"
    stages = {name: list(parts_of(plain.get(name))) for name in ("normalizer", "pre_tokenizer", "decoder", "model")}
    for reading in (("normalizer", "pre_tokenizer"), ("decoder",)):
        growth = 1.0
        for part in (part for name in reading for part in stages[name]):
            growth = min(growth * _growth(part), 1e18)
        if growth > MAX_GROWTH:
            return f"its {reading[0]} makes up to {growth:,.0f} characters of one, but at most {MAX_GROWTH} are allowed"
    if all(map(_is_harmless, (part for parts in stages.values() for part in parts))):
        return ""
    return _try(definition.encode())


def parts_of(stage: Any) -> Iterator[dict[str, Any]]:
    """The parts of a stage, with sequences flattened."""
    if stage is None:
        return
    if not isinstance(stage, dict):
        stage = {}
    yield stage
    for name in ("normalizers", "pretokenizers", "decoders"):
        inner = stage.get(name)
        for part in inner if isinstance(inner, list) else ():
            yield from parts_of(part)


def _is_harmless(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _HARMLESS and not (kind == "BPE" and part.get("continuing_subword_prefix"))


def _growth(part: dict[str, Any]) -> float:
    """The maximum number of characters that a part makes of one character."""
    match part:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(pattern)}} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": str(content)} | {"type": "Prepend", "prepend": str(content)}:
            return 1.0 + len(content)
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return _longest_of_map(encoded)
    return 1.0


def _longest_of_map(encoded: str) -> float:
    """The length of the longest text in a character map: the size of a trie, the trie, and zero-terminated texts."""
    try:
        content = base64.b64decode(encoded)
    except ValueError:
        return 1.0  # the library reports what is wrong
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return max([1.0, *(float(len(text.decode(errors="replace"))) for text in texts)])


def _try(definition: bytes) -> str:
    """Load and use a definition in a separate process; return a clause that says what went wrong, or an empty text."""
    found = find_spec("tokenizers")
    if not sys.executable or found is None or found.origin is None:
        return ""
    seconds, memory = _SECONDS * (1 + (len(definition) >> 24)), _MEMORY + 64 * len(definition)
    quiet = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    command = [sys.executable, "-I", "-c", _TRIAL, str(Path(found.origin).parents[1]), str(memory)]
    try:
        done = subprocess.run(command, input=definition, capture_output=True, timeout=seconds, env=quiet, check=False)
    except subprocess.TimeoutExpired:
        return f"loading it and reading a few words with it took longer than {seconds} s"
    except OSError:  # no process can be started here
        return ""
    if done.returncode == 3:
        return f"the tokenizers library fails on it: {done.stdout.decode(errors='replace').strip()}"
    if done.returncode < 0 or b"MemoryError" in done.stderr:
        return f"the tokenizers library crashed, or needed more than {memory >> 30} GiB of memory"
    return ""
