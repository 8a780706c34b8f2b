from pathlib import Path

import pytest

from lineartime.choices import Split
from lineartime.data import Corpus


def write(root: Path, files: dict[str, str] | dict[str, bytes]) -> Path:
    """Write files below a folder, and return it."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def documents(corpus: Corpus, split: Split = "all") -> list[str]:
    return ["".join(blocks) for blocks in corpus.documents(split)]


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is read in place of the hub."""
    monkeypatch.setenv("LINEARTIME_MIRROR", str(tmp_path / "mirror"))
    return tmp_path / "mirror"
