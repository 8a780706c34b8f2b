"""What tests do not touch: the user's cache, the network, and what the user has set in the environment."""

import subprocess
import sys
from pathlib import Path

from lineartime.host import cache_folder


def test_cache_of_the_user_is_left_as_it_is() -> None:
    home = Path.home() / ".cache"
    assert not cache_folder().is_relative_to(home)
    shown = subprocess.run(
        [sys.executable, "-c", "from lineartime.host import cache_folder as c; print(c())"], capture_output=True, text=True
    )
    assert shown.stdout.strip() == str(cache_folder())
