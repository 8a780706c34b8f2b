"""The versions of transformers that the adapter supports."""

import re

from lineartime.errors import LineartimeError, missing_extra
from lineartime.host import installed_version

OLDEST, NEWEST, NEXT_MAJOR = (5, 20), (5, 24), 6
"""The oldest and the newest version that the tests have passed with, and the first one that is refused unseen."""


def check_transformers() -> None:
    """Raise LineartimeError unless a supported version of transformers is installed."""
    found, version = installed_transformers()
    if not OLDEST <= version < (NEXT_MAJOR, 0):
        raise LineartimeError(
            f"lineartime.hf needs transformers {_text(OLDEST)} or newer and below {NEXT_MAJOR}, but version {found} is "
            "installed: pip install 'lineartime[hf]'."
        )


def installed_transformers() -> tuple[str, tuple[int, int]]:
    """The installed version of transformers, and its first two numbers; raises LineartimeError if there is none."""
    found = installed_version("transformers")
    if found is None:
        raise missing_extra("transformers", "hf", "lineartime.hf")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return found, (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def unfit(found: str, problem: str) -> LineartimeError:
    """An error for a version of transformers that is newer than those tested."""
    tested = f"{_text(OLDEST)} to {_text(NEWEST)}"
    return LineartimeError(
        f"lineartime.hf was tested with transformers {tested}, but version {found} is installed, with which {problem}: "
        f"pip install 'transformers<={_text(NEWEST)}.99'."
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
