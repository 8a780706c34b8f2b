"""The packages that are compared with: `make test` installs all of them, at the versions that the documents state."""

import re
from pathlib import Path

from tests.peers.packages import PACKAGES

ROOT = Path(__file__).parents[2]


def extra(name: str) -> str:
    """The requirements of an extra, as they stand in pyproject.toml."""
    found = re.search(rf"^{name} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def test_no_comparison_is_skipped_where_the_dev_extra_is_installed() -> None:
    required = re.findall(r'"([\w-]+)[=>]=', extra("peers") + extra("others"))
    assert sorted(required, key=str.lower) == sorted(PACKAGES.values(), key=str.lower)
    assert re.search(r'"lineartime\[.*\bpeers,others\b.*\]"', extra("dev"))
