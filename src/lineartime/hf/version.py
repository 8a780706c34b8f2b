"""The versions of transformers that the adapter supports."""

import re

from lineartime.errors import LineartimeError, missing_extra
from lineartime.host import installed_version

OLDEST, NEXT_MAJOR = (5, 20), 6
"""The oldest version that the tests have passed with, and the first one that is refused unseen."""


def check_transformers() -> None:
    """Raise LineartimeError unless a supported version of transformers is installed."""
    found = installed_version("transformers")
    if found is None:
        raise missing_extra("transformers", "hf", "lineartime.hf")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST <= version < (NEXT_MAJOR, 0):
        raise LineartimeError(
            f"lineartime.hf needs transformers {OLDEST[0]}.{OLDEST[1]} or newer and below {NEXT_MAJOR}, but version {found} is "
            "installed: pip install 'lineartime[hf]'."
        )
