"""What tests do not touch: the user's cache, the network, and what the user has set in the environment."""

import os
import subprocess
import sys
from pathlib import Path

from huggingface_hub import constants

from lineartime.host import cache_folder


def test_cache_of_the_user_is_left_as_it_is() -> None:
    home = Path.home() / ".cache"
    assert not cache_folder().is_relative_to(home)
    shown = subprocess.run(
        [sys.executable, "-c", "from lineartime.host import cache_folder as c; print(c())"], capture_output=True, text=True
    )
    assert shown.stdout.strip() == str(cache_folder())


def test_hugging_face_hub_is_not_asked() -> None:
    assert constants.HF_HUB_OFFLINE  # as it was when the library was imported


def test_settings_of_the_user_do_not_decide_what_is_tested() -> None:
    assert not {"WORLD_SIZE", "RANK", "LOCAL_RANK", "ONEDNN_MAX_CPU_ISA"} & os.environ.keys()
    assert {name for name in os.environ if name.startswith("LINEARTIME_")} <= {"LINEARTIME_NATIVE"}
