"""Files that other programs read, such as token shards: how to recognise them, and what to do instead of reading them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HEAD = 1 << 16  # bytes in which a file has its marks


@dataclass(frozen=True)
class Layout:
    """A kind of files that are not read.

    Attributes:
        what: what they are.
        advice: what to do instead; empty if there is nothing but to choose other files.
        name: a pattern of the names of the files that tell it.
        marks: what these files have at their beginning.
        whole: whether all in the folder of such a file, and below, is of this kind; otherwise, only the file itself.
        beside: the suffix of a file of the same name that is of this kind, too; then `whole` does not count.
    """

    what: str
    advice: str = ""
    name: str = ""
    marks: tuple[bytes, ...] = ()
    whole: bool = True
    beside: str = ""

    def is_told_by(self, path: Path) -> bool:
        """Whether a file tells this kind. Raises OSError if it cannot be read."""
        if not re.fullmatch(self.name, path.name, re.IGNORECASE):
            return False
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
        return all(mark in head for mark in self.marks)


_SAVED = ("files of save_to_disk", "write each split by to_parquet and give those files")
_WRITE = "write the texts to Parquet or JSON lines and give those files"
_TOKENS = "give the text that the tokens were made from"

BINARY = Layout("binary files")
LAYOUTS = (
    Layout(*_SAVED, r"dataset_dict\.json", (b'"splits"',)),
    Layout(*_SAVED, r"state\.json", (b'"_data_files"',)),
    Layout(*_SAVED, r".*\.arrow", whole=False),
    Layout("shards of MosaicML Streaming", _WRITE, r"index\.json", (b'"shards"', b'"mds"')),
    Layout("chunks of litdata", _WRITE, r"index\.json", (b'"chunk_bytes"', b'"filename"')),
    Layout("token files of Megatron-LM", _TOKENS, r".*\.idx", (b"MMIDIDX",), beside=".bin"),
    Layout("token files", _TOKENS, r"(.*_)?(train|val)(_\d+)?\.(bin|npy)", (b"\0",), whole=False),
    Layout("tar archives", "unpack them and give the folder", r".*\.(tar(\.\w+)?|t(gz|bz2?|xz|zst))", whole=False),
)


def layouts_of(paths: Iterable[Path]) -> dict[Path, Layout]:
    """The kind of each of these files that is not read. Raises OSError if a file cannot be read."""
    paths = sorted(paths, key=lambda path: len(path.parts))  # of nested folders, the outermost counts
    told = {path: layout for path in paths if (layout := next((each for each in LAYOUTS if each.is_told_by(path)), None))}
    folders: dict[Path, Layout] = {}
    pairs: dict[Path, Layout] = {}
    for path, layout in told.items():
        if layout.beside:
            pairs[path.with_suffix(layout.beside)] = layout
        elif layout.whole:
            folders.setdefault(path.parent, layout)
    return (
        told
        | {path: pairs[path] for path in paths if path in pairs}
        | {path: folders[each] for path in paths for each in path.parents if each in folders}
    )
